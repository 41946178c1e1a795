// What was found, drawn over an image. Owns: colours, shapes and where they lie. Knows no request.

const GOLDEN_RATIO = 0.618034; // Steps of it around the colour circle keep neighbouring classes apart.
const BONES = [[0, 1], [0, 2], [1, 3], [2, 4], [5, 6], [5, 7], [7, 9], [6, 8], [8, 10], [5, 11], [6, 12], [11, 12],
  [11, 13], [13, 15], [12, 14], [14, 16]]; // Of COCO's 17 key points.

export function colour(classId) {
  const hue = Math.round(((classId * GOLDEN_RATIO) % 1) * 360);
  return `hsl(${hue} 85% 62%)`;
}

// The list in an entry whose members have a place, and its name; undefined where there is none. Members of tasks that
// other packages bring are drawn as well: with their `score` and their first text.
export const placedIn = (prediction) => Object.entries(prediction).find(([, each]) => Array.isArray(each) && each.every((one) => one?.box || one?.corners || one?.segments || one?.keypoints));

// The map of an answer as a picture: classes in their colours, depth from dark to bright; null where there is none.
export async function mapOf(prediction) {
  const png = prediction.class_map?.png ?? prediction.depth?.png;
  if (!png) return null;
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (prediction.class_map) {
    const inks = prediction.areas.map(({ class_id: id }) => {
      context.fillStyle = colour(id);
      context.fillRect(0, 0, 1, 1);
      return [id & 255, context.getImageData(0, 0, 1, 1).data];
    });
    const inkOf = new Map(inks);
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height);
    for (let at = 0; at < pixels.data.length; at += 4) pixels.data.set(inkOf.get(pixels.data[at]) ?? [], at);
    context.putImageData(pixels, 0, 0);
  } else context.drawImage(image, 0, 0);
  return canvas;
}

// What an instance is called; of two stages, with what the second says of it.
export const nameOf = (found) => found.classes?.length ? `${found.label}: ${found.classes[0].label}`
  : found.label ?? Object.values(found).find((each) => typeof each === "string") ?? "";

const point = (each) => Array.isArray(each) ? each : [each.x, each.y, each.score];

// Polygons of an instance, each a list of [x, y], whichever of the usual forms they come in.
export function polygons(found) {
  const given = found.segments || (Array.isArray(found.mask) ? found.mask : null);
  if (!given) return [];
  if (!Array.isArray(given)) return given.x ? [given.x.map((x, i) => [x, given.y[i]])] : [];
  if (!given.length) return [];
  const first = given[0];
  if (first.x && Array.isArray(first.x)) return given.map((part) => part.x.map((x, i) => [x, part.y[i]]));
  const nested = Array.isArray(first) && (Array.isArray(first[0]) || typeof first[0] === "object");
  return nested ? given.map((part) => part.map(point)) : [given.map(point)];
}

export const keypoints = (found) => (found.keypoints || []).map(point);
export const corners = (found) => (found.corners || []).map(point);

// [x1, y1, x2, y2] around everything that is known of an instance, in pixels of the image; null for a class.
export function extent(found) {
  if (found.box) return [found.box.x1, found.box.y1, found.box.x2, found.box.y2];
  const all = [...corners(found), ...polygons(found).flat(), ...keypoints(found)];
  if (!all.length) return null;
  const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
  return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
}

// The instance under a point of the image, the smallest one where several are; -1 where there is none.
export function instanceAt(instances, x, y) {
  let best = -1, least = Infinity;
  instances.forEach((found, index) => {
    const box = extent(found);
    if (!box || x < box[0] || y < box[1] || x > box[2] || y > box[3]) return;
    const area = (box[2] - box[0]) * (box[3] - box[1]);
    if (area < least) { least = area; best = index; }
  });
  return best;
}

function trace(context, points, scale) {
  context.beginPath();
  points.forEach((p, i) => context[i ? "lineTo" : "moveTo"](p[0] * scale, p[1] * scale));
  context.closePath();
}

// Draw instances; `scale`: canvas pixels for a pixel of the image; `lit`: index of the one to bring out, or -1;
// `unit`: canvas pixels for a CSS pixel.
export function drawInstances(context, instances, scale, unit, lit = -1) {
  const { width, height } = context.canvas;
  if (lit >= 0 && instances[lit] && extent(instances[lit])) {
    const [x1, y1, x2, y2] = extent(instances[lit]).map((value) => value * scale);
    context.fillStyle = "#000a";
    context.beginPath();
    context.rect(0, 0, width, height);
    context.rect(x1, y1, x2 - x1, y2 - y1);
    context.fill("evenodd");
  }
  const order = instances.map((_, index) => index).filter((index) => index !== lit).reverse();
  if (lit >= 0 && instances[lit]) order.push(lit);
  for (const index of order) {
    context.globalAlpha = lit >= 0 && index !== lit ? 0.25 : 1;
    drawInstance(context, instances[index], scale, unit, index === lit);
  }
  context.globalAlpha = 1;
}

function drawInstance(context, found, scale, unit, lit) {
  const ink = colour(found.class_id ?? 0);
  const line = (lit ? 3.5 : 2.5) * unit;
  context.lineJoin = "round";
  for (const outline of polygons(found)) {
    trace(context, outline, scale);
    context.fillStyle = ink.replace(")", " / .35)");
    context.fill();
    stroke(context, ink, line * 0.8);
  }
  const turned = corners(found);
  if (turned.length) {
    trace(context, turned, scale);
    stroke(context, ink, line);
  } else if (found.box) {
    const { x1, y1, x2, y2 } = found.box;
    context.beginPath();
    context.rect(x1 * scale, y1 * scale, (x2 - x1) * scale, (y2 - y1) * scale);
    stroke(context, ink, line);
  }
  drawKeypoints(context, keypoints(found), scale, unit, ink);
  const at = extent(found);
  if (at) label(context, `${nameOf(found)} ${found.score.toFixed(2)}`, at[0] * scale, at[1] * scale, unit, ink);
}

// A dark edge below the coloured line: it shows on every ground.
function stroke(context, ink, line) {
  context.lineWidth = line + 2;
  context.strokeStyle = "#0009";
  context.stroke();
  context.lineWidth = line;
  context.strokeStyle = ink;
  context.stroke();
}

function drawKeypoints(context, points, scale, unit, ink) {
  const seen = (p) => p && (p[2] === undefined || p[2] >= 0.3);
  if (points.length === 17) {
    for (const [from, to] of BONES) {
      if (!seen(points[from]) || !seen(points[to])) continue;
      context.beginPath();
      context.moveTo(points[from][0] * scale, points[from][1] * scale);
      context.lineTo(points[to][0] * scale, points[to][1] * scale);
      stroke(context, ink, 2 * unit);
    }
  }
  for (const p of points.filter(seen)) {
    context.beginPath();
    context.arc(p[0] * scale, p[1] * scale, 3.5 * unit, 0, 7);
    context.fillStyle = "#fff";
    context.fill();
    stroke(context, ink, 1.5 * unit);
  }
}

export function label(context, text, x, y, unit, ink) {
  const small = context.canvas.width < 480 * unit ? 0.8 : 1; // Labels leave a small image something to see.
  const size = 13 * small * unit, pad = 5 * unit, high = size + pad;
  context.font = `600 ${size}px system-ui, sans-serif`;
  const wide = context.measureText(text).width + 2 * pad;
  const left = Math.max(0, Math.min(x - 1.5 * unit, context.canvas.width - wide));
  const top = y - high >= 0 ? y - high - unit : Math.min(y + 2 * unit, context.canvas.height - high);
  context.fillStyle = ink;
  context.beginPath();
  context.roundRect(left, top, wide, high, 4 * unit);
  context.fill();
  context.fillStyle = "#0b0d17";
  context.textBaseline = "middle";
  context.fillText(text, left + pad, top + high / 2 + 0.5 * unit);
}
