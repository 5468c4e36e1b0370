"""Train a multi-head sLSTM with clipped recurrent gradients and checkpointed activations."""

import torch

from flashrnn_deploy.nn import MultiHeadRNN

torch.manual_seed(0)
torch.set_num_threads(1)
network = MultiHeadRNN(2, 32, num_heads=4, cell="slstm", batch_first=True, gradient_clip=1.0, checkpoint_steps=8)
scores = torch.nn.Linear(32, 2)
parameters = [*network.parameters(), *scores.parameters()]
optimizer = torch.optim.Adam(parameters, lr=0.02)
for _ in range(60):
    bits = torch.randint(0, 2, (64, 8))
    parity = bits.cumsum(1) % 2
    y, _ = network(torch.nn.functional.one_hot(bits, 2).float())
    loss = torch.nn.functional.cross_entropy(scores(y).flatten(0, 1), parity.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
print(f"loss of guessing 0.693, after 60 steps {loss.item():.3f}")
assert loss.item() < 0.6
