"""The form of a log line."""

import io
import json
import logging

import pytest
import structlog
from kvplane.kernel.context import Caller, set_caller
from kvplane.runtime import logs


@pytest.fixture(autouse=True)
def _reset():
    yield
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = []


class Terminal(io.StringIO):
    def isatty(self):
        return True


async def test_json_lines_carry_the_caller_and_the_time():
    out = io.StringIO()
    logs.configure("info", "auto", out)
    set_caller(Caller("acme", "r1"))
    structlog.get_logger().info("hello", tokens=3)
    line = json.loads(out.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "message": "hello",
        "level": "info",
        "tokens": 3,
        "tenant": "acme",
        "request_id": "r1",
    }


def test_levels_filter():
    out = io.StringIO()
    logs.configure("warning", "json", out)
    structlog.get_logger().info("no")
    logging.getLogger("lib").info("no")
    structlog.get_logger().warning("yes")
    assert [json.loads(line)["message"] for line in out.getvalue().splitlines()] == ["yes"]


def test_other_libraries_look_the_same():
    out = io.StringIO()
    logs.configure("info", "json", out)
    logging.getLogger("lib").warning("from %s", "elsewhere")
    line = json.loads(out.getvalue())
    assert (line["message"], line["level"], line["logger"]) == ("from elsewhere", "warning", "lib")


def test_an_exception_is_one_line_of_json():
    out = io.StringIO()
    logs.configure("info", "json", out)
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        structlog.get_logger().error("broken", exc_info=error)
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["exception"][0]["exc_type"] == "ZeroDivisionError"


@pytest.mark.parametrize("form", ["json", "console"])
def test_an_exception_shows_no_values(form):
    """Local variables hold keys and prompts."""
    out = io.StringIO()
    logs.configure("info", form, out)

    def fail(key):
        raise ValueError("broken")

    for log in (structlog.get_logger().error, logging.getLogger("other").error):
        try:
            fail("kvp_" + "s3cret")
        except ValueError:
            log("failed", exc_info=True)
    assert out.getvalue().count("broken") >= 2
    assert "test_logs.py" in out.getvalue()
    assert "kvp_s3cret" not in out.getvalue()


def test_a_value_that_json_does_not_know():
    out = io.StringIO()
    logs.configure("info", "json", out)
    structlog.get_logger().info("odd", value=object())
    assert "object object" in json.loads(out.getvalue())["value"]


def test_on_a_terminal_it_is_text():
    out = Terminal()
    logs.configure("info", "auto", out)
    structlog.get_logger().info("hello", tokens=3)
    assert "hello" in out.getvalue()
    assert not out.getvalue().startswith("{")
