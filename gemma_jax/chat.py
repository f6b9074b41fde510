"""ChatSession: a conversation that remembers its turns, on top of `LLM.stream_chat`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gemma_jax.errors import RequestError
from gemma_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gemma_jax.llm import LLM

Message = dict[str, Any]


class ChatSession:
    """A conversation with one model; each turn sees the ones before.

    Args:
      llm: the model; it stays open when the session ends.
      system: the system message, kept by `reset`.
      sampling_params: of every answer; None means the checkpoint's generation_config, and an
        answer as long as the context allows.
    """

    def __init__(
        self,
        llm: "LLM",
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
    ):
        if sampling_params is None:
            sampling_params = llm.generation_defaults.sampling_params().replace(max_tokens=None)
        if sampling_params.n != 1:
            raise RequestError(f"n is {sampling_params.n}; a chat has one answer a turn, n=1")
        self._llm = llm
        self._sampling_params = sampling_params
        self._opening: list[Message] = []
        if system is not None:
            self._opening = [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, as `{"role", "content"}` messages."""
        return [dict(message) for message in self._messages]

    def chat(self, text: str) -> str:
        """Return the whole answer to the user's next message.

        Raises:
          RequestError: the message is empty, or the conversation is longer than the context.
        """
        return "".join(self.stream(text))

    def stream(self, text: str) -> Iterator[str]:
        """Yield the answer to the user's next message, piece by piece.

        An answer that was stopped half-way (the iterator closed, or Ctrl-C) is remembered as far
        as it went; a turn with no answer at all, for instance after an error, is forgotten.

        Raises:
          RequestError: as for `chat`.
        """
        if not text.strip():
            raise RequestError("the message is empty; expected some text")
        messages = [*self._messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            for chunk in self._llm.stream_chat(messages, self._sampling_params):
                if chunk.text:
                    answer.append(chunk.text)
                    yield chunk.text
        finally:
            if answer:
                reply = {"role": "assistant", "content": "".join(answer)}
                self._messages = [*messages, reply]

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self._messages = list(self._opening)
