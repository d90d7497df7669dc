"""Who is asked: a server over HTTP, or the runtime in this process."""
