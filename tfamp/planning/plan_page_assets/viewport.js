// What part of the drawing is seen: scale and offset of a layer within a canvas.

const MIN_SCALE = 0.02;
const MAX_SCALE = 3;

class Viewport {
  constructor(canvas, layer) {
    Object.assign(this, { canvas, layer, scale: 1, x: 0, y: 0, dragged: false });
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDrag(event));
  }

  transform() {
    this.layer.setAttribute("transform", `translate(${this.x},${this.y}) scale(${this.scale})`);
  }

  moveBy(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.transform();
  }

  viewSize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    return { w: width || 900, h: height || 500 };
  }

  zoom(factor, cx = this.viewSize().w / 2, cy = this.viewSize().h / 2) {
    const scale = Math.min(MAX_SCALE, Math.max(MIN_SCALE, this.scale * factor));
    this.x = cx - ((cx - this.x) * scale) / this.scale;
    this.y = cy - ((cy - this.y) * scale) / this.scale;
    this.scale = scale;
    this.transform();
  }

  // The whole of a place where that stays readable, else its top.
  frame(place, least, most = 1.15) {
    const view = this.viewSize();
    const whole = Math.min((view.w - 40) / place.w, (view.h - 40) / place.h);
    this.scale = Math.min(most, Math.max(least, whole));
    this.x = (view.w - place.w * this.scale) / 2 - place.x * this.scale;
    const free = view.h - place.h * this.scale;
    this.y = (free > 40 ? free / 2 : 20) - place.y * this.scale;
    this.transform();
  }

  // Leaves things as they are where a place is in sight.
  bringIntoView(place, least) {
    const view = this.viewSize();
    const left = place.x * this.scale + this.x;
    const top = place.y * this.scale + this.y;
    const right = left + place.w * this.scale;
    const bottom = top + place.h * this.scale;
    const inSight = left >= 0 && top >= 0 && right <= view.w && bottom <= view.h;
    if (!inSight) this.frame(place, least, Math.max(this.scale, least));
  }

  onWheel(event) {
    event.preventDefault();
    const { left, top } = this.canvas.getBoundingClientRect();
    this.zoom(Math.exp(-event.deltaY * 0.0015), event.clientX - left, event.clientY - top);
  }

  onDrag(start) {
    const from = { x: this.x, y: this.y };
    const move = (event) => {
      const [dx, dy] = [event.clientX - start.clientX, event.clientY - start.clientY];
      // Few pixels are a click with an unsteady hand.
      if (!this.dragged && Math.hypot(dx, dy) < 4) return;
      this.dragged = true;
      [this.x, this.y] = [from.x + dx, from.y + dy];
      this.transform();
    };
    this.dragged = false;
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", () => window.removeEventListener("pointermove", move), {
      once: true,
    });
  }
}
