"""How GraphDefs name tensors and control inputs; framework-free."""


def node_name(tensor: str) -> str:
    """Returns the name of the node of a tensor ("x:0") or of a control input ("^x")."""
    return tensor.removeprefix("^").partition(":")[0]
