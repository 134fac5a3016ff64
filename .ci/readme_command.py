"""Prints the N-th command of README.md's first shell block, counting from 1.

CI runs the printed command, so README's commands are known to work.
"""

import re
import sys
from pathlib import Path


def shell_commands(text: str) -> list[str]:
    """The commands of the first shell block, continuation lines joined, prompts removed."""
    block = re.search(r"^```(?:sh|bash|shell|console)\b[^\n]*\n(.*?)^```\s*$", text, re.M | re.S)
    if block is None:
        raise SystemExit("README.md has no shell block")
    lines = block[1].replace("\\\n", " ").splitlines()
    stripped = (line.strip().removeprefix("$ ") for line in lines)
    return [line for line in stripped if line and not line.startswith("#")]


if __name__ == "__main__":
    commands = shell_commands((Path(__file__).parents[1] / "README.md").read_text("utf-8"))
    number = int(sys.argv[1])
    if not 1 <= number <= len(commands):
        raise SystemExit(f"README.md's first shell block has {len(commands)} commands, no {number}")
    print(commands[number - 1])
