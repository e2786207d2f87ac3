"""The front door: the OpenAI API, admission, tenants and the choice of workers for each request."""
