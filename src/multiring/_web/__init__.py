"""Parts of web servers: who may reach one, files of tokens, a small server, and OpenMetrics text."""
