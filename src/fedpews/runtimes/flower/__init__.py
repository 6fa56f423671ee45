"""The same experiment across real sites, with Flower as the network.

Only this room imports ``flwr`` (the extra ``[flower]``). What a user imports is in `fedpews.flower`.
"""
