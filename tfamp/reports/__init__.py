"""What people read: plans, tables and pages, made of plain data."""
