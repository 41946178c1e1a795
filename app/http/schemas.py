"""The shapes of answers and errors, for `/docs` and for tests.

Owns: what a client may rely on in an answer. Must not be used to make answers: those are written straight to JSON, and
a test holds real ones against these models.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Schema(BaseModel):
    """A part of an answer. A field that is not named here is a mistake, in the answer or here."""

    model_config = ConfigDict(extra="forbid")


class Box(Schema):
    """A box in pixels of the image as displayed: x1, y1 is its upper left corner, x2, y2 its lower right one."""

    x1: float
    y1: float
    x2: float
    y2: float


class KeyPoint(Schema):
    """A key point in pixels of the image; the score is the network's confidence that it is visible."""

    x: float
    y: float
    score: float


class TurnedBox(Schema):
    """A turned box: its centre and sides in pixels of the image, and its angle in radians, clockwise."""

    cx: float
    cy: float
    w: float
    h: float
    angle: float


class Mask(Schema):
    """A mask, as asked for by `masks`: run lengths of the whole image (COCO), or a PNG that begins at (x, y)."""

    size: list[int] = Field(description="Height and width of the image")
    counts: str | None = Field(None, description="Run lengths, column by column, as pycocotools writes them")
    png: str | None = Field(None, description="A PNG of 0 and 255, in base64")
    x: int | None = None
    y: int | None = None


class ImageClass(Schema):
    """One of the best `top_k` classes for the image."""

    label: str
    class_id: int = Field(ge=0)
    score: float = Field(ge=0, le=1)


class Detection(Schema):
    """An object that was found. The fields after `box` depend on the model's task."""

    label: str
    class_id: int = Field(ge=0)
    score: float = Field(ge=0, le=1)
    box: Box
    segments: list[list[list[float]]] | None = Field(None, description="Outlines of its mask: rings of [x, y]")
    mask: Mask | None = Field(None, description="Its mask in another form; null where the image has too many pixels")
    keypoints: list[KeyPoint] | None = None
    obb: TurnedBox | None = None
    classes: list[ImageClass] | None = Field(None, description="Of two stages: what the second says of this object")
    corners: list[list[float]] | None = Field(None, description="Four corners [x, y] of the turned box, in order")


class DetectedImage(Schema):
    """The objects found in an image, best score first. Width and height are the image's, as displayed."""

    detections: list[Detection]
    width: int
    height: int


class ClassifiedImage(Schema):
    """The classes of an image, best score first. Width and height are the image's, as displayed."""

    classes: list[ImageClass]
    width: int
    height: int


class EmbeddedImage(Schema):
    """The vector of an image: numbers, or base64 of little-endian float32, as asked for by `encoding`."""

    embedding: list[float] | str
    width: int
    height: int


class Area(Schema):
    """The pixels of a class, and their share of the image."""

    label: str
    class_id: int = Field(ge=0)
    area: int = Field(ge=0)
    share: float = Field(ge=0, le=1)
    mask: Mask | None = Field(None, description="With `masks=rle`: run lengths of the map")


class ClassMap(Schema):
    """The class of each pixel: a PNG of 8 bits, or of 16 if there are more than 256 classes."""

    size: list[int] = Field(description="Height and width of the map")
    png: str


class SegmentedImage(Schema):
    """The classes of an image's pixels, the largest area first."""

    areas: list[Area]
    class_map: ClassMap | None = Field(None, description="Not with `masks=rle` or `none`")
    width: int
    height: int


class DepthMap(Schema):
    """The depth of each pixel: `min` + level / 65535 * (`max` - `min`), or the network's own float32."""

    size: list[int] = Field(description="Height and width of the map")
    min: float
    max: float
    png: str | None = Field(None, description="16 bits, in base64")
    float32: str | None = Field(None, description="With `encoding=base64`: little-endian, row by row")


class DepthImage(Schema):
    """The depth of an image."""

    depth: DepthMap
    width: int
    height: int


class RegressedImage(Schema):
    """The numbers that the network gives for an image, by name."""

    values: dict[str, float]
    width: int
    height: int


class PredictAnswer(Schema):
    """The answer to `:predict`: one entry for each image, in the order of the request, and what computed it."""

    model: str
    predictions: list[DetectedImage | ClassifiedImage | EmbeddedImage | SegmentedImage | DepthImage | RegressedImage]
    weights: str = Field(description="Where the weights come from: official, sample, random, or a file's name")
    device: str
    engine: str
    precision: str
    simulated: bool = Field(False, description="Present and true where the CPU stands in for an accelerator")


class ErrorAnswer(Schema):
    """The body of every error, on every route."""

    error: str = Field(description="One plain sentence for people; it may change")
    code: str = Field(description="For programs; it does not change")
    request_id: str = Field(description="The log has the detail under it")


class JsonOutput(Schema):
    """A tensor of an Open Inference answer. As binary data its bytes follow the JSON, and `data` is absent."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float | int | str | bool] | None = None
    parameters: dict[str, int | float | str | bool] | None = None


class InferAnswer(Schema):
    """The answer to `/infer`, as JSON."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, int | float | str | bool]
    outputs: list[JsonOutput]
