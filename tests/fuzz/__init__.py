"""Random input at every RPC and every endpoint, with its consequences looked at."""
