"""Whether a site's clock agrees with the coordinator's: Flower refuses what is signed with a time that is off."""

from __future__ import annotations

import ssl
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path

AHEAD, BEHIND = 5, 305
"""Seconds that flwr allows; it answers anything else with a 401 that does not say why."""


def explain_contact(superlink: str, authority: Path, timeout: float = 5) -> str | None:
    """What keeps this site from connecting, in a sentence: the address, its clock or the coordinator's certificate.

    Args:
        superlink: the coordinator's address, ``host:port``.
        authority: the certificate authority that vouches for it.
    """
    try:
        ahead = _seconds_ahead(superlink, authority, timeout)
    except ssl.SSLCertVerificationError as error:
        return f"the coordinator's certificate is not accepted: {error.verify_message}"
    except OSError as error:
        return f"the coordinator cannot be reached at {superlink} ({error.strerror or error}); trying again"
    except (HTTPException, ValueError):
        return None
    if -BEHIND < ahead < AHEAD:
        return None
    word = "ahead of" if ahead > 0 else "behind"
    return (
        f"this site's clock is {abs(ahead):.0f} s {word} the coordinator's, and Flower refuses what it sends. "
        "Set it by NTP: timedatectl set-ntp true"
    )


def _seconds_ahead(superlink: str, authority: Path, timeout: float) -> float:
    host, _, port = superlink.rpartition(":")
    context = ssl.create_default_context(cafile=authority)
    connection = HTTPSConnection(host.strip("[]"), int(port), timeout=timeout, context=context)
    try:
        # any answer has the time in its header, a refusal too
        connection.request("HEAD", "/")
        answered = connection.getresponse()
        now = time.time()
    finally:
        connection.close()
    told = parsedate_to_datetime(answered.headers.get("Date", "")).timestamp()
    # the header has whole seconds, cut off
    return now - (told + 0.5)
