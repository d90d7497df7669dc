"""What goes over the wire: msgspec types of OpenAI's API, decoding and its errors."""
