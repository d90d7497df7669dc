"""What is asked of a server, and when: arrivals, lengths, conversations, sampling."""
