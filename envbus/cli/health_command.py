"""``envbus health``: asks a health page, for supervisors that run a command: containers have no curl."""

from __future__ import annotations

from typing import Annotated

import typer

TIMEOUT_S = 5.0


def health(
    url: Annotated[
        str, typer.Argument(help="The page: /livez, or /readyz of envbus serve, up or dashboard.")
    ] = "http://127.0.0.1:9464/readyz",
) -> int:
    """Exit with 0 if a health page answers 200, else with 1 and the reason.

    The page is that of "envbus serve --metrics-port 9464", of "envbus up --metrics-port", or of the dashboard.
    """
    import http.client
    import urllib.error
    import urllib.request

    from envbus.cli.reporting import EXIT_FAILED, EXIT_OK, print_error
    from envbus.errors import UsageError

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not the address of a page; it begins with http://")
    # Without the proxies of the environment: they are not for this host.
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    try:
        with ask(url, timeout=TIMEOUT_S):
            return EXIT_OK
    except urllib.error.HTTPError as error:
        with error:
            print_error(error.read(200).decode("utf-8", "replace").strip() or str(error), code=str(error.code))
    except (OSError, ValueError, http.client.HTTPException) as error:
        print_error(f"no answer from {url}: {getattr(error, 'reason', error)}", code="silent")
    return EXIT_FAILED
