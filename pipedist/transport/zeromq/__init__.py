"""ZeroMQ sockets: a ROUTER in an asyncio loop, and a blocking DEALER."""
