"""The debugger: every file and every value at every call, in the browser."""
