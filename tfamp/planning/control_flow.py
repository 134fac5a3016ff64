"""The ops that run functions of the library as parts of a graph; framework-free."""

from __future__ import annotations

LOOPS = frozenset({"StatelessWhile", "While"})
CONDITIONALS = frozenset({"Case", "If", "StatelessCase", "StatelessIf"})
BRANCHING = LOOPS | CONDITIONALS
# The op of nodes that stand for what a loop's function takes and gives, where `planning.linking`
# has joined it with the graph around the loop; no node can have such an op.
LINK = "<link>"
