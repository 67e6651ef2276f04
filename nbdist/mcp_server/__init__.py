"""`nbdist mcp`: agents use sessions by the Model Context Protocol. Needs the extra `nbdist[mcp]`.

agent_tools.py    the tools that agents see
answer_texts.py   their answers as text
session_links.py  finds the session that is meant, and asks whoever drives it
http_access.py    the token and the server on loopback
agent_server.py   from the command to the end of the process
"""
