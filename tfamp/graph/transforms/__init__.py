"""GraphDefs to GraphDefs: what is done to a graph before and after its dtypes are decided."""
