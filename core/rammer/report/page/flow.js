// A graph that reads like text: layers from left to right, wrapped into lines. Zooming changes the size of the boxes and wraps
// again, so only vertical scrolling is needed.
const SIZES = [[4, 4], [7, 6], [12, 9], [20, 12], [30, 15], [44, 20], [64, 26], [92, 40], [124, 46], [164, 50]];
const MOST_VIRTUAL = 60000;

// Return columns of slots. A slot has the item (or -1 on a long edge), its column, its row and the slots that it leads to.
function layered(total, edges) {
  const before = Array.from({ length: total }, () => []), after = Array.from({ length: total }, () => []);
  for (const [from, to] of edges)
    if (from < to) {
      before[to].push(from);
      after[from].push(to);
    }
  const layer = new Int32Array(total);
  for (let k = 0; k < total; k++) for (const p of before[k]) layer[k] = Math.max(layer[k], layer[p] + 1);
  for (let k = total - 1; k >= 0; k--)
    if (!before[k].length && after[k].length) layer[k] = Math.max(0, Math.min(...after[k].map(a => layer[a])) - 1);
  const slots = [], columns = [];
  const add = (item, column) => {
    const slot = { item, column, row: 0, next: [], last: [] };
    slots.push(slot);
    (columns[column] ||= []).push(slot);
    return slot;
  };
  for (let k = 0; k < total; k++) add(k, layer[k]);
  let room = MOST_VIRTUAL;
  for (let k = 0; k < total; k++)
    for (const target of after[k]) {
      let from = slots[k];
      const span = layer[target] - layer[k] - 1;
      if (span > 0 && span <= room) {
        room -= span;
        for (let c = layer[k] + 1; c < layer[target]; c++) {
          const virtual = add(-1, c);
          from.next.push(virtual);
          virtual.last.push(from);
          from = virtual;
        }
      }
      from.next.push(slots[target]);
      slots[target].last.push(from);
    }
  for (let c = 0; c < columns.length; c++) columns[c] ||= [];
  const settle = column => column.forEach((s, k) => (s.row = k - (column.length - 1) / 2));
  columns.forEach(settle);
  for (let sweep = 0; sweep < 6; sweep++) {
    const down = sweep % 2 === 0;
    for (let c = 0; c < columns.length; c++) {
      const column = columns[down ? c : columns.length - 1 - c];
      for (const s of column) {
        const near = down ? s.last : s.next;
        s.wish = near.length ? sum(near, n => n.row) / near.length : s.row;
      }
      column.sort((a, b) => a.wish - b.wish);
      settle(column);
    }
  }
  return { slots, columns };
}

// ``items`` have label, sub, fill and port; ``describe`` returns lines for an item, ``pick`` is called with one.
function flow(options) {
  const { items, edges, describe, pick, chosen, dimmed, label, most } = options;
  const { slots, columns } = layered(items.length, edges);
  const box = el('div', { class: 'flow', tabindex: '0', role: 'group', 'aria-label': label });
  const spacer = el('div', { style: { position: 'absolute', top: '0', width: '1px' } });
  const view = surface(120, label, draw);
  const detail = el('p', { class: 'detail', 'aria-live': 'polite' });
  let level = -1, lines = [], perLine = 1, hovered = -1, current = -1;
  const margin = 16, gap = () => SIZES[level][1] * 0.5 + 8;

  function wrap(width, k) {
    const [w, h] = SIZES[k], per = Math.max(1, Math.floor((width - 2 * margin) / w)), found = [];
    let top = 10;
    for (let first = 0; first < columns.length; first += per) {
      const reach = Math.max(0.5, ...columns.slice(first, first + per).map(c => (c.length ? Math.max(...c.map(s => Math.abs(s.row))) + 0.5 : 0.5)));
      found.push({ first, top, middle: top + reach * h, height: 2 * reach * h });
      top += 2 * reach * h + h * 0.5 + 8;
    }
    return { per, found, height: top };
  }

  function arrange() {
    if (!view.width) return;
    if (level < 0) {
      level = SIZES.length - 1;
      while (level > 0 && wrap(view.width, level).height > most) level--;
    }
    const made = wrap(view.width, level);
    lines = made.found;
    perLine = made.per;
    view.height = Math.min(made.height, most + 60);
    box.style.height = `${view.height + 2}px`;
    spacer.style.height = `${made.height}px`;
    view.redraw();
  }

  function place(slot) {
    const [w] = SIZES[level], line = lines[Math.floor(slot.column / perLine)];
    return [margin + ((slot.column % perLine) + 0.5) * w, line.middle + slot.row * SIZES[level][1], line];
  }

  function draw(context, width, height) {
    if (!lines.length) return;
    const [w, h] = SIZES[level], top = box.scrollTop, padX = w > 80 ? 7 : w > 30 ? 4 : Math.max(0.5, w * 0.12), padY = h > 18 ? 5 : Math.max(0.5, h * 0.14);
    context.clearRect(0, 0, width, height);
    context.translate(0, -top);
    const seen = line => line.top + line.height > top - 40 && line.top < top + height + 40;
    const first = lines.findIndex(seen);
    const shown = lines.filter(seen);
    if (!shown.length) return;
    const from = Math.max(0, lines[first].first - 1), to = Math.min(columns.length, shown[shown.length - 1].first + perLine + 1);
    context.lineWidth = w > 30 ? 1.2 : 0.7;
    for (let c = from; c < to; c++)
      for (const slot of columns[c])
        for (const next of slot.next) {
          const [x0, y0, l0] = place(slot), [x1, y1, l1] = place(next);
          const lit = hovered >= 0 && (slot.item === hovered || next.item === hovered);
          context.strokeStyle = lit ? theme.accent : theme.faint;
          context.globalAlpha = lit ? 1 : 0.55;
          const a = x0 + (slot.item < 0 ? 0 : w / 2 - padX), b = x1 - (next.item < 0 ? 0 : w / 2 - padX);
          context.beginPath();
          if (l0 === l1) {
            const bend = Math.min(18, Math.max((b - a) / 2, w / 2));
            context.moveTo(a, y0);
            context.bezierCurveTo(a + bend, y0, b - bend, y1, b, y1);
          } else {
            context.moveTo(a, y0);
            context.lineTo(width - 4, y0);
            context.moveTo(4, y1);
            context.lineTo(b, y1);
          }
          context.stroke();
        }
    context.globalAlpha = 1;
    for (let c = from; c < to; c++)
      for (const slot of columns[c]) {
        if (slot.item < 0) continue;
        const item = items[slot.item], [x, y] = place(slot), bw = w - 2 * padX, bh = h - 2 * padY;
        context.globalAlpha = dimmed(slot.item) ? 0.22 : 1;
        round(context, x - bw / 2, y - bh / 2, bw, bh, item.port ? 99 : 5);
        context.fillStyle = item.fill || theme.track;
        if (item.port) context.fillStyle = theme.paper;
        context.fill();
        const strong = chosen(slot.item) || slot.item === hovered || slot.item === current;
        if (item.port || strong) {
          context.strokeStyle = strong ? theme.ink : theme.faint;
          context.lineWidth = strong ? 2 : 1;
          context.stroke();
        }
        if (w >= 44) {
          context.textAlign = 'center';
          context.fillStyle = item.port || !item.fill ? theme.ink : theme.on;
          context.font = `600 ${w >= 92 ? 11.5 : 9.5}px ${FONT}`;
          const two = h >= 40 && item.sub;
          context.fillText(clipped(context, item.label, bw - 4), x, y + (two ? -1.5 : 3.5));
          if (two) {
            context.font = `10px ${FONT}`;
            context.globalAlpha *= 0.8;
            context.fillText(clipped(context, item.sub, bw - 8), x, y + 11.5);
          }
        }
      }
    context.globalAlpha = 1;
    context.textAlign = 'left';
  }

  function at(event) {
    const bounds = view.canvas.getBoundingClientRect(), x = event.clientX - bounds.left, y = event.clientY - bounds.top + box.scrollTop;
    const line = lines.find(l => y >= l.top - 4 && y <= l.top + l.height + 4);
    const column = line && columns[line.first + Math.floor((x - margin) / SIZES[level][0])];
    if (!column || x < margin || (x - margin) / SIZES[level][0] >= perLine) return -1;
    const found = column.find(s => s.item >= 0 && Math.abs(place(s)[1] - y) <= SIZES[level][1] / 2);
    return found ? found.item : -1;
  }

  function show(item) {
    current = item;
    const slot = slots[item], [, y] = place(slot);
    if (y < box.scrollTop + 20 || y > box.scrollTop + view.height - 20) box.scrollTop = y - view.height / 2;
    detail.textContent = describe(item).map(l => (typeof l === 'string' ? l : l.join(' '))).join(' · ');
    view.redraw();
  }

  box.addEventListener('scroll', view.redraw);
  view.canvas.addEventListener('pointermove', event => {
    const found = at(event);
    if (found !== hovered) {
      hovered = found;
      view.redraw();
    }
    view.canvas.style.cursor = found >= 0 ? 'pointer' : 'default';
    if (found >= 0) showTip(event.clientX, event.clientY, describe(found));
    else hideTip();
  });
  view.canvas.addEventListener('pointerleave', () => {
    hovered = -1;
    hideTip();
    view.redraw();
  });
  view.canvas.addEventListener('click', event => {
    const found = at(event);
    if (found >= 0) {
      show(found);
      pick(found);
    }
  });
  box.addEventListener('keydown', event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) show(Math.max(0, Math.min(items.length - 1, current + step)));
    else if (event.key === 'Enter' && current >= 0) pick(current);
    else if (event.key === '+' || event.key === '-') zoom(event.key === '+' ? 1 : -1);
    else return;
    event.preventDefault();
  });
  function zoom(step) {
    const share = box.scrollTop / Math.max(1, spacer.offsetHeight);
    level = Math.max(0, Math.min(SIZES.length - 1, level + step));
    arrange();
    box.scrollTop = share * spacer.offsetHeight;
  }
  box.append(spacer, view.canvas);
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width === view.width) return;
    view.width = width;
    arrange();
  }).observe(box);
  const tools = [
    el('button', { type: 'button', 'aria-label': 'Smaller boxes', onclick: () => zoom(-1) }, '−'),
    el('button', { type: 'button', 'aria-label': 'Larger boxes', onclick: () => zoom(1) }, '+'),
  ];
  return { element: el('div', {}, box, detail), tools, close: view.close };
}
