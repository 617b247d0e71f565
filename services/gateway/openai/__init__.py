"""The OpenAI dialect (`/v1/*`): its request schema, its objects and chunks, its errors. Pure: no socket, no call."""
