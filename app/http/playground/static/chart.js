// A small chart over time. Owns: its drawing. Knows nothing of what it shows.

// `series`: [{values, colour, kind: "area" | "line" | "bars"}]; null values are gaps. `slots`: how many fill the chart.
export function drawChart(canvas, series, slots) {
  const unit = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * unit), height = Math.round(canvas.clientHeight * unit);
  if (!width || !height) return;
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const style = getComputedStyle(canvas);
  const soft = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
  const top = niceCeiling(Math.max(...series.flatMap((each) => each.values.map((value) => value ?? 0)), 0));
  const left = 34 * unit, low = height - 4 * unit, high = 8 * unit;
  const y = (value) => low - (low - high) * value / top;
  slots = Math.max(slots, ...series.map((each) => each.values.length));
  const step = (width - left) / Math.max(1, slots - 1);
  context.font = `${11 * unit}px system-ui, sans-serif`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    context.strokeStyle = line;
    context.lineWidth = unit;
    context.beginPath();
    context.moveTo(left, y(top * share));
    context.lineTo(width, y(top * share));
    context.stroke();
    if (share) {
      context.fillStyle = soft;
      context.fillText(short(top * share), left - 6 * unit, y(top * share));
    }
  }
  for (const { values, colour, kind } of series) {
    const ink = style.getPropertyValue(colour);
    context.fillStyle = context.strokeStyle = ink;
    if (kind === "bars") {
      const wide = Math.max(2 * unit, step * 0.62);
      values.forEach((value, i) => {
        if (!value) return;
        context.beginPath();
        context.roundRect(Math.min(left + i * step, width - wide), y(value), wide, low - y(value), [2 * unit, 2 * unit, 0, 0]);
        context.fill();
      });
      continue;
    }
    const points = values.map((value, i) => [left + i * step, value]).filter(([, value]) => value !== null).map(([x, value]) => [x, y(value)]);
    if (!points.length) continue;
    context.lineWidth = 2 * unit;
    context.lineJoin = "round";
    context.beginPath();
    points.forEach(([x, at], i) => context[i ? "lineTo" : "moveTo"](x, at));
    context.stroke();
    if (kind === "area") {
      context.lineTo(points.at(-1)[0], low);
      context.lineTo(points[0][0], low);
      context.globalAlpha = 0.16;
      context.fill();
      context.globalAlpha = 1;
    }
  }
}

const short = (value) => value >= 1000 ? `${+(value / 1000).toPrecision(3)}k` : String(+value.toPrecision(3));

function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].find((each) => each * power >= value) * power;
}
