"""Opening pages in a browser without a window, where one is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def open_page(path: Path, profile: Path, address: str = "", *options: str) -> tuple[str, str]:
    """Opens a page; skips the test where there is no Chromium.

    Args:
        path: The page.
        profile: A folder for the browser's own files.
        address: What follows the path in the address: "#n12".
        options: More options of Chromium.

    Returns:
        The document as the browser has it, and what the page wrote to the console.
    """
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={profile}", "--virtual-time-budget=5000"]
    command += ["--window-size=1400,1000", "--enable-logging=stderr", *options]
    command += ["--dump-dom", f"{path.as_uri()}{address}"]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=120)
    messages = [line for line in shown.stderr.decode().splitlines() if "CONSOLE" in line]
    return shown.stdout.decode("utf-8"), "\n".join(messages)
