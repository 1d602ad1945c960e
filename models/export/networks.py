"""The real models that are exported and compared: torchvision's, and small transformer and recurrent
networks written as their users write them. Each entry of NETWORKS builds (module, inputs, labels)."""

import math

import torch
import torch.nn.functional as F
import torchvision
from torch import nn


def image_batch(size, classes, batch=2):
    return [torch.randn(batch, 3, size, size)], torch.randint(classes, (batch,))


def token_batch(vocab, seq, batch=2):
    return [torch.randint(vocab, (batch, seq))], torch.randint(vocab, (batch, seq))


def vision(build, size, classes=10):
    def make():
        model = build(num_classes=classes)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return (model, *image_batch(size, classes))

    return make


class CausalAttention(nn.Module):
    def __init__(self, width, heads, seq):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(seq, seq)).bool())

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, w // self.heads).transpose(1, 2)
                   for t in self.qkv(x).split(w, dim=2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)
        scores = scores.masked_fill(~self.mask[:s, :s], float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, s, w))


class GptBlock(nn.Module):
    def __init__(self, width, heads, seq):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads, seq)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    """A decoder with learned positions and a head tied to the token embedding."""

    def __init__(self, vocab=81, seq=16, width=32, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads, seq) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class Bert(nn.Module):
    """A post-norm encoder with a linear head."""

    def __init__(self, vocab=67, seq=16, width=32, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Parameter(torch.randn(seq, width) * 0.02)
        self.layers = nn.ModuleList(self.layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab)
        self.heads = heads

    @staticmethod
    def layer(width, heads):
        return nn.ModuleDict({
            "q": nn.Linear(width, width), "k": nn.Linear(width, width), "v": nn.Linear(width, width),
            "o": nn.Linear(width, width), "n1": nn.LayerNorm(width), "f1": nn.Linear(width, 4 * width),
            "f2": nn.Linear(4 * width, width), "n2": nn.LayerNorm(width)})

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        b, s, w = x.shape
        for layer in self.layers:
            q, k, v = (layer[n](x).view(b, s, self.heads, w // self.heads).permute(0, 2, 1, 3)
                       for n in "qkv")
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(w // self.heads)
            y = torch.matmul(F.softmax(scores, -1), v).permute(0, 2, 1, 3).reshape(b, s, w)
            x = layer["n1"](x + layer["o"](y))
            x = layer["n2"](x + layer["f2"](F.gelu(layer["f1"](x))))
        return self.head(x)


class Llama(nn.Module):
    """One block with RMSNorm, rotary positions, SwiGLU and grouped-query attention."""

    def __init__(self, vocab=61, seq=12, width=32, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.d = heads, kv_heads, width // heads
        self.tok = nn.Embedding(vocab, width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.d, bias=False)
        self.v = nn.Linear(width, kv_heads * self.d, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 48, bias=False)
        self.up = nn.Linear(width, 48, bias=False)
        self.down = nn.Linear(48, width, bias=False)
        self.n1, self.n2, self.n3 = (nn.Parameter(torch.ones(width) + 0.1 * torch.randn(width))
                                     for _ in range(3))
        self.head = nn.Linear(width, vocab, bias=False)
        angles = torch.outer(torch.arange(seq).double(),
                             10000 ** (-torch.arange(0, self.d, 2).double() / self.d))
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())
        self.register_buffer("mask", torch.full((seq, seq), float("-inf")).triu(1))

    @staticmethod
    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def rotate(self, x):
        half = self.d // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos + turned * self.sin

    def forward(self, ids):
        x = self.tok(ids)
        b, s, w = x.shape
        y = self.norm(x, self.n1)
        q = self.rotate(self.q(y).view(b, s, self.heads, self.d).transpose(1, 2))
        k = self.rotate(self.k(y).view(b, s, self.kv_heads, self.d).transpose(1, 2))
        v = self.v(y).view(b, s, self.kv_heads, self.d).transpose(1, 2)
        repeats = self.heads // self.kv_heads
        k, v = (t[:, :, None].expand(-1, -1, repeats, -1, -1).reshape(b, self.heads, s, self.d)
                for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.d) + self.mask
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, w))
        y = self.norm(x, self.n2)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norm(x, self.n3))


class UNet(nn.Module):
    """Two levels with GroupNorm, a transposed convolution and a bilinear upsampling."""

    def __init__(self, classes=5):
        super().__init__()
        self.d1, self.d2 = self.double(3, 8), self.double(8, 16)
        self.middle = self.double(16, 16)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.u2 = self.double(32, 8)
        self.u1 = self.double(16, 8)
        self.head = nn.Conv2d(8, classes, 1)

    @staticmethod
    def double(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU(),
                             nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU())

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        y = self.up2(self.middle(F.max_pool2d(b, 2)))
        y = self.u2(torch.cat([b, y], 1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.u1(torch.cat([a, y], 1)))


class Lstm(nn.Module):
    def __init__(self, vocab=40, width=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.tok(ids))[0])


def text(build, vocab, seq):
    return lambda: (build(), *token_batch(vocab, seq))


def unet():
    return UNet(), [torch.randn(2, 3, 16, 16)], torch.randint(5, (2, 16, 16))


def vit(build, **sizes):
    """torchvision begins with a head of zeros, under which every other gradient is zero. Heads of 16 or
    64 have scales that are the same in float32, in which the exporter writes numbers."""
    def model(num_classes):
        result = build(num_classes=num_classes, **sizes)
        torch.nn.init.trunc_normal_(result.heads.head.weight, std=0.02)
        return result
    return model


NETWORKS = {
    "resnet18": vision(torchvision.models.resnet18, 64),
    "densenet121": vision(torchvision.models.densenet121, 64),
    "squeezenet1_1": vision(torchvision.models.squeezenet1_1, 64),
    "shufflenet_v2": vision(torchvision.models.shufflenet_v2_x0_5, 64),
    "mobilenet_v2": vision(torchvision.models.mobilenet_v2, 64),
    "mobilenet_v3_small": vision(torchvision.models.mobilenet_v3_small, 64),
    "vit_small": vision(vit(torchvision.models.VisionTransformer, image_size=32, patch_size=8,
                            num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64), 32),
    "vit_b_16": vision(vit(torchvision.models.vit_b_16), 224),
    "gpt": text(Gpt, 81, 16),
    "bert": text(Bert, 67, 16),
    "llama": text(Llama, 61, 12),
    "unet": unet,
    "lstm": text(Lstm, 40, 10),
}
