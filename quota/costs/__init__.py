"""What a call to a model or a query of rows costs, in exact arithmetic and without I/O.

| module | what it answers |
|---|---|
| `tokens` | what a call used, and what that takes from a provider's quota |
| `prices` | what a usage costs, and the most that a request may cost; the book of prices |
| `estimate` | the most that a request may use: its input in tokens, its ceiling on output |
| `requests` | how the requests of the providers' clients are read |
| `names` | which names mean the same model |
| `catalogs` | prices from `genai-prices` and from price maps in JSON |
| `rows` | what a query costs, and what may be held before the answer is known |
| `pools` | a provider's quotas, from the JSON of `aws service-quotas list-service-quotas` |

Amounts are `Decimal` or `int`; a float is refused.
"""
