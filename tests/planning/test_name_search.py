"""Names of nodes behind their callers' names, and names like a pattern."""

from tfamp.planning.options import MOST_CALLERS, caller_names, full_name, nearest_names


def test_a_function_has_the_names_of_all_its_callers_and_ends_where_it_calls_itself():
    calls = {
        "": [("one", "f"), ("two/cond", "f"), ("two/cond", "g")],
        "f": [("cond/while", "body")],
        "body": [("again", "f"), ("again", "body")],
    }
    found = caller_names(calls)
    assert found["g"] == ["two/cond"]
    assert found["f"][:2] == ["one", "two/cond"]
    assert found["body"][:2] == ["one/cond/while", "two/cond/while"]
    doubling = {str(i or ""): [("a", str(i + 1)), ("b", str(i + 1))] for i in range(64)}
    assert len(caller_names(doubling)["64"]) == MOST_CALLERS


def test_a_name_that_repeats_its_callers_is_not_written_twice():
    assert full_name("layer/call/cond", "cond/MatMul") == "layer/call/cond/MatMul"
    assert full_name("cond", "cond") == "cond/cond"
    assert full_name("a/b", "a/c") == "a/b/a/c"
    assert full_name("", "MatMul") == "MatMul"


def test_the_nearest_names_are_those_behind_a_caller_however_unlike_they_are():
    names = [["MatMul", "dense/MatMul", "tower/MatMul"], ["x"], []]
    assert nearest_names("dens/MatMul", names) == "'dense/MatMul', 'x'"
    assert nearest_names("dens/MatMul", []) == ""
