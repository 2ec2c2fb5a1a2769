"""Transformer blocks as people write them, each with the idioms of a well-known code; nothing knows of being cut."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY = 32, 4, 64


class FusedBlock(nn.Module):
    """Fused projections, split by width; shapes from the input (as in nanoGPT)."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)

    def attend(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp.c_proj(F.dropout(F.gelu(self.mlp.c_fc(self.ln_2(x))), 0.1, self.training))


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def repeat_kv(x, repeats):
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, repeats, length, width).reshape(batch, -1, length, width)


class GroupedBlock(nn.Module):
    """Fewer keys than queries, rotary positions, norms of heads, gated units (as Llama and Qwen in transformers)."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = HEADS, HEADS // 2, WIDTH // HEADS
        self.hidden_size = WIDTH
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down_proj = nn.Linear(64, WIDTH, bias=False)
        self.input_norm, self.post_norm, self.q_norm = RMSNorm(WIDTH), RMSNorm(WIDTH), RMSNorm(WIDTH // HEADS)

    def attend(self, hidden_states):
        bsz, q_len, _ = hidden_states.size()
        q = self.q_norm(self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.num_kv_heads, self.head_dim).transpose(1, 2)
        angles = torch.arange(q_len)[:, None] * 0.1 ** torch.arange(self.head_dim // 2)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = repeat_kv(k, self.num_heads // self.num_kv_heads), repeat_kv(v, self.num_heads // self.num_kv_heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).contiguous().reshape(bsz, q_len, self.hidden_size))

    def forward(self, x):
        x = x + self.attend(self.input_norm(x))
        hidden = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class MaskedBlock(nn.Module):
    """Separate projections, a mask that is added, dropout of attention (as BERT in transformers)."""

    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.all_head_size = WIDTH
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense, self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout, self.norm1, self.norm2 = nn.Dropout(0.1), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def heads(self, x):
        return x.view(x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)).permute(0, 2, 1, 3)

    def forward(self, x):
        mask = torch.zeros(x.shape[0], 1, 1, x.shape[1])
        mask[:, :, :, -1] = -10000.0
        scores = torch.matmul(self.heads(self.query(x)), self.heads(self.key(x)).transpose(-1, -2))
        probabilities = self.dropout(nn.functional.softmax(scores / self.attention_head_size**0.5 + mask, dim=-1))
        context = torch.matmul(probabilities, self.heads(self.value(x))).permute(0, 2, 1, 3).contiguous()
        context = context.view(context.size()[:-2] + (self.all_head_size,))
        x = self.norm1(x + self.dropout(self.dense(context)))
        return self.norm2(x + self.dropout(self.fc2(F.gelu(self.fc1(x)))))


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round (as GPT-2 in transformers)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.1), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class EinsumBlock(nn.Module):
    """Heads by einsum; a gate and its values in one projection; recomputed in backward; a learned bias of scores."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, HEADS).view(HEADS, 1, 1))

    def attend(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        return self.c_proj(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))

    def forward(self, x):
        x = x + checkpoint(self.attend, self.norm(x), use_reentrant=False)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(gate.sigmoid() * up)


class CrossBlock(nn.Module):
    """`nn.MultiheadAttention` in both its ways, and torch's own encoder layer."""

    def __init__(self):
        super().__init__()
        self.cross = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.1, batch_first=True)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        seen, weights = self.cross(x, x.flip(1), x.flip(1), key_padding_mask=padding)
        return self.encoder(x + seen + weights.mean(), src_mask=mask, is_causal=True)


BLOCKS = (FusedBlock, GroupedBlock, MaskedBlock, EinsumBlock, CrossBlock)


class Model(nn.Module):
    """Tokens, one block, and a head."""

    def __init__(self, block):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.block(self.embed(tokens))))


def make(block):
    """(model, data) of a kind of block, the same on every worker."""
    torch.manual_seed(3)
    return Model(block), torch.randint(0, VOCABULARY, (64, 9))


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
