// The image on the page with what was found in it. Owns: the canvas, its size, hovering. Knows no request.
import { drawInstances, instanceAt, label } from "./draw.js";

export class Stage {
  constructor(canvas, frame, onHover) {
    this.canvas = canvas;
    this.frame = frame;
    this.context = canvas.getContext("2d");
    this.source = null; // What is drawn: an ImageBitmap or a video.
    this.width = 0; // Of the image, in pixels.
    this.height = 0;
    this.instances = [];
    this.map = null; // Drawn over the image: a canvas with a colour for each place.
    this.caption = "";
    this.lit = -1;
    canvas.addEventListener("pointermove", (event) => {
      const shape = canvas.getBoundingClientRect();
      const x = (event.clientX - shape.left) / shape.width * this.width;
      const y = (event.clientY - shape.top) / shape.height * this.height;
      onHover(instanceAt(this.instances, x, y));
    });
    canvas.addEventListener("pointerleave", () => onHover(-1));
    new ResizeObserver(() => this.fit()).observe(frame);
  }

  show(source, width, height) {
    Object.assign(this, { source, width, height, instances: [], map: null, caption: "", lit: -1 });
    this.canvas.hidden = false;
    this.canvas.dataset.size = JSON.stringify([width, height]);
    this.fit();
  }

  clear() {
    this.source = null;
    this.canvas.hidden = true;
  }

  // Give the canvas the size the image has on the page, in pixels of the screen.
  fit() {
    if (!this.source) return;
    const unit = window.devicePixelRatio || 1;
    const most = Math.max(220, Math.min(window.innerHeight * 0.68, 900));
    const scale = Math.min(this.frame.clientWidth / this.width, most / this.height, 3);
    const wide = Math.max(1, Math.round(this.width * scale)), high = Math.max(1, Math.round(this.height * scale));
    this.canvas.style.width = `${wide}px`;
    this.canvas.style.height = `${high}px`;
    const width = Math.round(wide * unit), height = Math.round(high * unit);
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    this.draw();
  }

  draw() {
    if (!this.source) return;
    const { context, canvas } = this;
    this.drawGround(context);
    const unit = canvas.width / parseFloat(canvas.style.width);
    drawInstances(context, this.instances, canvas.width / this.width, unit, this.lit);
    if (this.caption) label(context, this.caption, 10 * unit, 10 * unit, unit, "hsl(238 85% 82%)");
  }

  // The image, and the map over it.
  drawGround(context) {
    const { width, height } = context.canvas;
    context.drawImage(this.source, 0, 0, width, height);
    if (!this.map) return;
    context.globalAlpha = 0.6;
    context.drawImage(this.map, 0, 0, width, height);
    context.globalAlpha = 1;
  }

  // The image at its own size, with everything drawn in, as PNG.
  async save() {
    const canvas = document.createElement("canvas");
    canvas.width = this.width;
    canvas.height = this.height;
    const context = canvas.getContext("2d");
    this.drawGround(context);
    const unit = Math.max(1, Math.max(this.width, this.height) / 900);
    drawInstances(context, this.instances, 1, unit);
    if (this.caption) label(context, this.caption, 10 * unit, 10 * unit, unit, "hsl(238 85% 82%)");
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }
}
