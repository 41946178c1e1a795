// Results as files. Owns: the CSV and the COCO JSON that `anychip predict` writes as well. Knows no element.
// `lines`: an entry of "predictions" with its `file`, or `file` and `error`.
import { nameOf, placedIn } from "./draw.js";

const COLUMNS = ["file", "width", "height", "label", "class_id", "score", "x1", "y1", "x2", "y2", "error"];

// As many decimals as boxes have.
const rounded = (value) => Math.round(value * 100) / 100;

const quoted = (value) => /[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;

// A row for each box, class, area (its share is the score) or value; one without them for an image that has none.
function rows(line) {
  const head = [line.file, line.width, line.height];
  const values = Object.entries(line.values ?? {}).map(([label, score]) => ({ label, score }));
  const found = placedIn(line)?.[1] ?? line.classes ?? line.areas ?? values;
  if (!found.length) return [[...head, ...Array(7), line.error]];
  return found.map((each) => [...head, each.label ?? nameOf(each), each.class_id, each.score ?? each.share,
    ...["x1", "y1", "x2", "y2"].map((side) => each.box?.[side]), undefined]);
}

export function csv(lines) {
  return [COLUMNS, ...lines.flatMap(rows)].map((row) => `${row.map((value) => quoted(String(value ?? ""))).join(",")}\r\n`).join("");
}

// Returns the area within outlines [x, y, x, y, ...].
function within(outlines) {
  const twice = (outline) => outline.reduce((sum, x, i) => (i % 2 ? sum : sum + x * outline.at(i + 3 - outline.length) - outline.at(i + 2 - outline.length) * outline[i + 1]), 0);
  return outlines.reduce((sum, outline) => sum + Math.abs(twice(outline)), 0) / 2;
}

// `category_id` is the model's own `class_id`; an image that failed is left out.
export function coco(lines) {
  const images = [], annotations = [], labels = new Map();
  for (const { file, width, height, detections } of lines.filter((line) => line.detections)) {
    const imageId = images.push({ id: images.length + 1, file_name: file, width, height });
    for (const found of detections) {
      const { x1, y1, x2, y2 } = found.box;
      // Fewer than three points enclose nothing, and COCO's readers take four numbers for a box.
      const outlines = [...(found.segments ?? []), found.corners ?? []].filter((outline) => outline.length > 2).map((outline) => outline.flat());
      const points = found.keypoints && { keypoints: found.keypoints.flatMap(({ x, y }) => [x, y, 1]), num_keypoints: found.keypoints.length };
      labels.set(found.class_id, found.label);
      annotations.push({ id: annotations.length + 1, image_id: imageId, category_id: found.class_id, score: found.score,
        bbox: [x1, y1, x2 - x1, y2 - y1].map(rounded), iscrowd: 0, ...points,
        ...(outlines.length ? { segmentation: outlines, area: rounded(within(outlines)) } : { area: rounded((x2 - x1) * (y2 - y1)) }) });
    }
  }
  const categories = [...labels].sort(([a], [b]) => a - b).map(([id, name]) => ({ id, name }));
  return { images, annotations, categories };
}
