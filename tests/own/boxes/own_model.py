"""A detector that is called as torchvision's are, and the average precision of what it finds."""

import torch
from torch import nn
from torch.nn import functional as F


class OwnModel(nn.Module):
    """From a list of images to a dict of losses, or, when it does not train, to a list of dicts of boxes."""

    def __init__(self):
        super().__init__()
        sizes = [(1, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 2), (32, 32, 1), (32, 32, 1)]
        layers = [part for a, b, step in sizes for part in (nn.Conv2d(a, b, 3, step, 1), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Conv2d(32, 5, 1))  # for each 4 x 4 pixels: centre?, and two corners

    def forward(self, images, targets=None):
        maps = [self.net(image[None])[0].permute(1, 2, 0) for image in images]
        if targets is None:
            return [self.boxes(scores) for scores in maps]
        losses = [self.losses(*pair) for pair in zip(maps, targets, strict=True)]
        return {name: sum(loss[name] for loss in losses) / len(losses) for name in ("centre", "corners")}

    def losses(self, scores, target):
        """Return the losses of one image; one without boxes has no loss of corners, but uses their weights."""
        boxes, is_centre = target["boxes"].to(scores.dtype), torch.zeros_like(scores[..., 0])
        columns, rows = ((boxes[:, :2] + boxes[:, 2:]) / 8).long().T
        is_centre[rows, columns] = 1
        corners = boxes / 4 - torch.stack([columns, rows, columns, rows], 1)
        distance = F.smooth_l1_loss(scores[rows, columns, 1:], corners, reduction="sum")
        centre = F.binary_cross_entropy_with_logits(scores[..., 0], is_centre, reduction="sum")
        return {"centre": centre, "corners": distance}

    def boxes(self, scores):
        """Return the boxes of one image where the score is above that of its neighbours."""
        score = scores[..., 0].sigmoid()
        peaks = (score == F.max_pool2d(score[None], 3, 1, 1)[0]) & (score > 0.05)
        rows, columns = peaks.nonzero().T
        corners = scores[peaks][:, 1:] + torch.stack([columns, rows, columns, rows], 1)
        return {"boxes": corners * 4, "scores": score[peaks]}


def average_precision(found, targets):
    """Return the area under precision and recall of the boxes of all images; half of a box has to be found."""
    rows = []
    for image, target in zip(found, targets, strict=True):
        free = target["boxes"].clone()
        for index in image["scores"].argsort(descending=True):
            box = image["boxes"][index]
            inner = (torch.minimum(box[2:], free[:, 2:]) - torch.maximum(box[:2], free[:, :2])).clamp(0).prod(1)
            overlap = inner / ((box[2:] - box[:2]).prod() + (free[:, 2:] - free[:, :2]).prod(1) - inner)
            hit = bool(len(free)) and bool(overlap.max() > 0.5)
            rows.append((image["scores"][index].item(), hit))
            if hit:
                free = free[torch.arange(len(free)) != overlap.argmax()]
    hits = torch.tensor([hit for _, hit in sorted(rows, reverse=True)], dtype=torch.float64)
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return ((precision * hits).sum() / sum(len(target["boxes"]) for target in targets)).item()
