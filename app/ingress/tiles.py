"""Tiles: the flow of a request whose images are also computed in tiles.

    header ─► the whole image and its tiles are items of one request ─► answers merged across seams

Owns: the limit of tiles of a request. models.tasks.tiles owns their places and the merge of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import invalid_request
from app.ingress.ingress import Ingress
from app.ingress.prediction import Answer, computed
from app.link import Encoded, Regions, ServedModel, Terms
from models import Options, PixelModel
from models.contract.cascade import Region
from models.tasks.tiles import Tiling, merged


async def predict_tiled(
    ingress: Ingress,
    served: ServedModel,
    images: Sequence[Encoded],
    terms: Terms,
    *,
    options: Options,
    tiling: Tiling,
) -> Answer:
    """Predict for images in tiles, all or nothing. The whole image is computed, too: that finds objects larger than a
    tile. Raises ServiceError.
    """
    model, most = served.model, ingress.link.settings.max_images
    if not isinstance(model, PixelModel) or not model.adapter.tiled:
        raise invalid_request(f"{model.name} finds no objects: tiles are of no use for it")
    if options.masks not in ("polygon", "none"):
        raise invalid_request("with tiles, masks are answered as polygons")
    sizes = ingress.link.sizes(images, terms)
    regions = [_regions(tiling, width, height) for width, height in sizes]
    count = sum(map(len, regions))
    if count > most:
        raise invalid_request(
            f"tiles of {tiling.side} pixels make {count} images of this request, and it may hold {most}: "
            "ask for larger tiles, or start the service with a larger --max-images"
        )
    contents = [Regions(image, places) for image, places in zip(images, regions, strict=True)]
    answer = await computed(ingress, served, contents, terms, options=options)
    left = iter(answer.predictions)
    predictions = []
    for (width, height), places in zip(sizes, regions, strict=True):
        parts = [(next(left), region.x, region.y) for region in places]
        predictions.append(await ingress.offload(merged, model.adapter, parts, width, height, options))
    return Answer(predictions, answer.computed_by)


def _regions(tiling: Tiling, width: int, height: int) -> list[Region]:
    tiles = [Region(*tile) for tile in tiling.tiles(width, height)]
    return tiles if len(tiles) == 1 else [Region(0, 0, width, height), *tiles]
