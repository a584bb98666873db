// Geometry of labels in the pixels of the picture. Nothing here touches the page.
export const isShape = (label) => Boolean(label.box || label.polygon || label.mask);

export function bounds(label) {
  if (label.box) { const [x, y, w, h] = label.box; return [x, y, x + w, y + h]; }
  const points = (label.polygon || []).flat();
  return [Math.min(...points.map((p) => p[0])), Math.min(...points.map((p) => p[1])), Math.max(...points.map((p) => p[0])), Math.max(...points.map((p) => p[1]))];
}

const within = (value, low, high) => Math.min(Math.max(value, low), high);
export const clamp = ([x, y], size) => [within(x, 0, size[0]), within(y, 0, size[1])];

export function boxOf(a, b, size) {
  const [p, q] = [clamp(a, size), clamp(b, size)];
  const box = [Math.min(p[0], q[0]), Math.min(p[1], q[1]), Math.abs(p[0] - q[0]), Math.abs(p[1] - q[1])];
  return box[2] > 0 && box[3] > 0 ? box : null;
}

// A label that a person moves is no computed one any more.
const drawn = (label) => {
  const { attributes = [], ...rest } = label;
  const kept = attributes.filter(([name]) => name !== "interpolated");
  return kept.length ? { ...rest, attributes: kept } : rest;
};

export function moved(label, dx, dy, size) {
  if (label.mask || !isShape(label)) return label;
  const [l, t, r, b] = bounds(label);
  dx = within(dx, -l, size[0] - r); dy = within(dy, -t, size[1] - b);
  if (label.box) return { ...drawn(label), box: [l + dx, t + dy, label.box[2], label.box[3]] };
  return { ...drawn(label), polygon: label.polygon.map((line) => line.map(([x, y]) => [x + dx, y + dy])) };
}

// The handle of a box is its corner 0 to 3; that of a polygon is [outline, point].
export function reshaped(label, handle, to, size) {
  to = clamp(to, size);
  if (label.box) {
    const [l, t, r, b] = bounds(label);
    const fixed = [handle % 2 ? l : r, handle < 2 ? b : t];
    const box = boxOf(fixed, to, size);
    return box ? { ...drawn(label), box } : label;
  }
  const polygon = label.polygon.map((line, i) => line.map((p, k) => (i === handle[0] && k === handle[1] ? to : p)));
  return { ...drawn(label), polygon };
}

export function grown(label, dx, dy, size) {
  if (!label.box) return label;
  const [x, y, w, h] = label.box;
  return { ...drawn(label), box: [x, y, within(w + dx, 1, size[0] - x), within(h + dy, 1, size[1] - y)] };
}

export const color = (classes, name) => `hsl(${(classes.indexOf(name) * 137.5 + 205) % 360} 85% 55%)`;

export function describe(label) {
  const kind = label.box ? "box" : label.polygon ? "polygon" : label.mask ? "mask" : "whole picture";
  const place = label.box ? ` ${label.box.map((v) => Math.round(v)).join(", ")}` : "";
  return `${label.class}, ${kind}${place}${label.track ? `, track ${label.track}` : ""}`;
}

// The pixels of a mask as an image of at most 1024 pixels a side.
export function maskImage(mask, fill) {
  const [width, height] = mask.size;
  const scale = Math.min(1, 1024 / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale)); canvas.height = Math.max(1, Math.round(height * scale));
  const bits = new Uint8Array(width * height);
  let at = 0;
  mask.runs.forEach((run, number) => { if (number % 2) bits.fill(1, at, at + run); at += run; });
  const context = canvas.getContext("2d");
  context.fillStyle = fill;
  for (let x = 0; x < canvas.width; x++) {
    const column = Math.min(width - 1, Math.floor((x + 0.5) / scale)) * height;
    for (let y = 0; y < canvas.height; y++) if (bits[column + Math.min(height - 1, Math.floor((y + 0.5) / scale))]) context.fillRect(x, y, 1, 1);
  }
  return canvas.toDataURL();
}
