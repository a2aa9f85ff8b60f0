"""The gateway's description of itself is true."""

import pytest
from aiohttp import web

OWN = {
    "/v1/models/{model}": "/v1/models/{model:.+}",
    "/v1/sessions/{name}": "/v1/sessions/{name:.+}",
}


def references(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


async def document(bench):
    async with bench.http.get("/openapi.json") as response:
        assert response.status == 200
        return await response.json()


async def test_it_has_every_endpoint_and_no_other(bench):
    await bench.start()
    said = {
        (method.upper(), OWN.get(path, path))
        for path, methods in (await document(bench))["paths"].items()
        for method in methods
    }
    app: web.Application = bench.gateway._gateway.app()
    there = {
        (route.method, route.resource.canonical.replace("{model}", "{model:.+}").replace(
            "{name}", "{name:.+}"))
        for route in app.router.routes()
        if route.method != "HEAD"
    }  # fmt: skip
    assert said == there


@pytest.mark.parametrize("auth", ["none", "api_key"])
async def test_it_hangs_together(bench, auth):
    await bench.start(auth=auth)
    whole = await document(bench)
    for reference in references(whole):
        found = whole
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
    statuses = {
        status
        for methods in whole["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
    }
    assert {s for s in statuses if s >= "500"} <= {"502", "503", "504"}
    for path, methods in whole["paths"].items():
        for operation in methods.values():
            asks = auth != "none" and (path.startswith("/v1/") or path == "/metrics")
            assert bool(operation["security"]) == asks
            assert asks <= ("401" in operation["responses"])
