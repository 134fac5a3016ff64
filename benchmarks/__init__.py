"""What tfamp costs and gains, measured on the machine at hand."""
