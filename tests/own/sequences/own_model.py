"""An LSTM that reads sentences of different lengths."""

from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class OwnModel(nn.Module):
    """From tokens (B, T), of which `lengths` count, to logits (B, 5, T)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.last = nn.Linear(32, 5)

    def forward(self, inputs):
        lengths = inputs["lengths"].cpu()
        packed = pack_padded_sequence(self.embed(inputs["tokens"]), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.last(states).transpose(1, 2)
