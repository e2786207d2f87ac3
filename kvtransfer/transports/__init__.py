"""Transports: each a Sender and a Receiver behind `kvtransfer.transport`."""
