"""What is counted: times of each request, figures of a repeat, confidence over repeats."""
