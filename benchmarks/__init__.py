"""Measures the costs and gains of tfamp on the machine at hand."""
