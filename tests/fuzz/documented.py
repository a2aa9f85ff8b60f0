"""Requests from the gateway's own OpenAPI document, right and wrong ones, by schemathesis."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fuzz.exchange import TIMEOUT_S, Heard
from fuzz.findings import Counts, Finding
from fuzz.front import MODEL, Front
from fuzz.http_judge import judge

_CHECKS: Final = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]


class Documented:
    """Draws requests that the document describes, or that it forbids."""

    def __init__(self, front: Front, document: dict[str, Any]) -> None:
        schema = schemathesis.openapi.from_dict(document)
        operations = [found.ok() for found in schema.get_all_operations()]
        self._front = front
        self._cases = st.one_of(
            *(
                operation.as_strategy(generation_mode=mode)
                for operation in operations
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            )
        )

    async def example(self, draw: Callable[[st.SearchStrategy[Any]], Any], counts: Counts) -> None:
        """Send one request. Raises Finding."""
        front = self._front
        case: Case = draw(self._cases)
        whose = draw(st.sampled_from(["theirs"] * 6 + ["ours", "none"]))
        if whose == "none":
            whose = "wrong"  # the document's own idea of a key
        else:
            case.headers["Authorization"] = f"Bearer {front.keys[whose]}"
        if isinstance(case.body, dict) and "model" in case.body and draw(st.booleans()):
            case.body["model"] = MODEL
        if "name" in case.path_parameters and draw(st.booleans()):
            case.path_parameters["name"] = front.sessions[
                draw(st.sampled_from(["ours", "theirs"]))
            ][0]
        try:
            answer = await asyncio.to_thread(case.call, base_url=front.url, timeout=TIMEOUT_S)
        except (requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL, UnicodeError):
            return  # not even this client sends it
        except requests.exceptions.Timeout:
            raise Finding(
                "internal_errors", f"no answer in time: {case.as_curl_command()}"
            ) from None
        sent = answer.request
        body = sent.body or b""
        asked = b"\n".join(
            [
                f"{sent.method} {sent.url} {dict(sent.headers)}".encode(),
                body if isinstance(body, bytes) else str(body).encode(),
            ]
        )
        headers = {name.lower(): value[0] for name, value in answer.headers.items()}
        head = f"{answer.status_code} {headers}".encode()
        heard = Heard(answer.status_code, headers, answer.content, head + b"\n" + answer.content)
        judge(front, counts, whose=whose, asked=asked, heard=heard, head_only=case.method == "HEAD")
        try:
            case.validate_response(answer, checks=_CHECKS)
        except (Failure, FailureGroup) as failure:
            raise Finding("internal_errors", f"not as documented: {failure}\n{asked!r}") from None
