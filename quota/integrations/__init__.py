"""What stands between an application and a model: each module optional, with an extra of the same name.

| module | guards |
|---|---|
| `openai` | `openai.OpenAI`, `AsyncOpenAI`: chat completions and responses, streams included |
| `anthropic` | `anthropic.Anthropic`, `AsyncAnthropic`: messages, streams included |
| `bedrock` | `boto3` clients of `bedrock-runtime`: converse, converse_stream, invoke_model |

`guard` is what they share: a `Guard` says whose money is spent, `Attempt` is one call's hold and what becomes of it.

`asgi` and `wsgi` stand in front of an application instead, and meter those who call it; they need no extra.
"""
