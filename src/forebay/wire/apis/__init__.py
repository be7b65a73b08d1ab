"""APIs besides OpenAI's chat: Anthropic's Messages, OpenAI's Responses, tokenization. Requests become chat values."""
