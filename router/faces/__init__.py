"""The APIs. An endpoint is a row of a table: method, path, body, and the code that answers."""
