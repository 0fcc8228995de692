"""Tool servers over MCP: started, pinned, capped, pooled, reaped."""
