'use strict';
// Elements, formats, colours and the selection that all charts share. Texts of the model become text nodes, never markup.
const data = JSON.parse(document.getElementById('data').textContent);
const reduced = matchMedia('(prefers-reduced-motion: reduce)');

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'style') Object.assign(made.style, value);
    else if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter(c => c !== null && c !== undefined && c !== ''));
  return made;
}

function digits(value, count = 3) {
  return value >= 1e3 ? Math.round(value).toLocaleString('en-US') : String(+value.toPrecision(count));
}

function duration(ns) {
  if (ns === null || ns === undefined) return '?';
  if (!ns) return '0';
  for (const [scale, unit] of [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs']]) if (ns >= scale) return `${digits(ns / scale)} ${unit}`;
  return `${digits(ns)} ns`;
}

const seconds = s => (s === null || s === undefined ? '?' : duration(s * 1e9));

function size(bytes) {
  for (const [scale, unit] of [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB']]) if (bytes >= scale) return `${digits(bytes / scale)} ${unit}`;
  return `${digits(bytes)} B`;
}

function metric(value, unit) {
  for (const [scale, prefix] of [[1e15, 'P'], [1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']])
    if (value >= scale) return `${digits(value / scale)} ${prefix}${unit}`;
  return `${digits(value)} ${unit}`;
}

const count = n => n.toLocaleString('en-US');
const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? '' : 's'}`;
const percent = x => (x >= 0.0995 ? `${Math.round(x * 100)}%` : `${digits(x * 100, 2)}%`);
const sum = (items, value) => items.reduce((all, item) => all + value(item), 0);

// --- colours ---------------------------------------------------------------------------------

const HUES = [255, 48, 152, 312, 92, 205, 18, 275, 125, 340];
let theme = {};

function readTheme() {
  const found = getComputedStyle(document.documentElement);
  const names = ['paper', 'sheet', 'ink', 'quiet', 'faint', 'line', 'track', 'accent', 'light', 'chroma', 'on'];
  theme = Object.fromEntries(names.map(n => [n, found.getPropertyValue(`--${n}`).trim()]));
}

// Operators get the facts of their form, and their place among those of their type.
for (const device of data.devices)
  for (const program of device.programs || []) {
    const seen = new Map();
    program.operators = program.operators.map(([name, form, computes, nodes, measured, how]) => {
      const { type } = program.forms[form], place = seen.get(type) || 0;
      seen.set(type, place + 1);
      return { ...program.forms[form], name, form, computes, nodes, measured, how, place };
    });
  }

// Types of operators over all devices, the longest first: each has a hue, and operators of one type have shades of it.
const types = new Map();
{
  const spent = new Map();
  for (const device of data.devices)
    for (const program of device.programs || []) {
      const all = sum(program.operators, o => o.seconds) || 1;
      for (const o of program.operators) spent.set(o.type, (spent.get(o.type) || 0) + o.seconds / all);
    }
  [...spent].sort((a, b) => b[1] - a[1]).forEach(([type], k) => types.set(type, k));
}

// What colours show: the type of ONNX operator, the kernel family, or each operator.
const SCHEMES = { type: 'ONNX type', family: 'kernel', name: 'operator' };
let scheme = 'type';
const families = new Map();
for (const device of data.devices) for (const p of device.programs || []) for (const o of p.operators) families.has(o.family) || families.set(o.family, families.size);

// Operators of one rank have neighbouring hues and several lightnesses.
function shade(rank, place) {
  const light = +theme.light + [0, 0.08, -0.065, 0.04][place % 4], turn = [0, 16, -14, 8, -20, 24][place % 6];
  return `oklch(${light} ${rank < HUES.length ? theme.chroma : 0.035} ${HUES[rank % HUES.length] + turn})`;
}

function colourOf(program, index) {
  const o = program.operators[index];
  if (!o) return theme.faint;
  if (scheme === 'name') return `oklch(${+theme.light + [0, 0.07, -0.05][index % 3]} ${theme.chroma} ${(index * 137.5) % 360})`;
  return scheme === 'type' ? shade(types.get(o.type) ?? 99, o.place) : shade(families.get(o.family), o.place);
}

const colour = type => shade(types.get(type) ?? 99, 0);

// --- selection, tooltip, canvas --------------------------------------------------------------

const selection = { program: null, operators: new Set(), listeners: new Set() };

function select(program, operators, text) {
  const same = selection.program === program && operators.length === selection.operators.size && operators.every(o => selection.operators.has(o));
  selection.program = same ? null : program;
  selection.operators = new Set(same ? [] : operators);
  if (text && !same) document.getElementById('live').textContent = text;
  for (const listener of selection.listeners) listener();
}

const isSelected = (program, index) => selection.program === program && selection.operators.has(index);
const isDimmed = (program, index) => selection.program === program && selection.operators.size > 0 && !selection.operators.has(index);

const tip = document.getElementById('tip');

function showTip(x, y, lines) {
  tip.replaceChildren(...lines.filter(Boolean).map(line => (typeof line === 'string' ? el('div', {}, el('b', {}, line)) : el('div', {}, el('span', {}, `${line[0]} `), String(line[1])))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(6, y - box.height - 12) : y + 18}px`;
}

function hideTip() {
  tip.hidden = true;
}

// A canvas of full width that is drawn again when its size, the colours or the selection change.
function surface(height, label, draw) {
  const canvas = el('canvas', { role: 'img', 'aria-label': label });
  const state = { canvas, width: 0, height, pending: false };
  state.redraw = () => {
    if (state.pending) return;
    state.pending = true;
    requestAnimationFrame(() => {
      state.pending = false;
      if (!canvas.isConnected || !state.width) return;
      const ratio = devicePixelRatio || 1;
      canvas.width = Math.round(state.width * ratio);
      canvas.height = Math.round(state.height * ratio);
      canvas.style.width = `${state.width}px`;
      canvas.style.height = `${state.height}px`;
      const context = canvas.getContext('2d');
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      draw(context, state.width, state.height);
    });
  };
  state.watch = element => new ResizeObserver(([entry]) => {
    state.width = Math.floor(entry.contentRect.width);
    state.redraw();
  }).observe(element);
  selection.listeners.add(state.redraw);
  state.close = () => selection.listeners.delete(state.redraw);
  return state;
}

const FONT = '"Segoe UI", system-ui, Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif';

function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = Math.floor((text.length * width) / context.measureText(text).width);
  while (kept > 0 && context.measureText(`${text.slice(0, kept)}…`).width > width) kept--;
  return kept > 0 ? `${text.slice(0, kept)}…` : '';
}

function round(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}
