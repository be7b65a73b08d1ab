"""APIs beside OpenAI's chat: Anthropic's Messages, OpenAI's Responses, tokens. Requests become the values of chat."""
