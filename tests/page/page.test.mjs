// Tests of the interactive timeline that `penstock schedule show --format html` writes, in a browser.
//
//   npm ci && PENSTOCK=/path/to/penstock node --test
//
// PENSTOCK_SHOTS=DIR keeps screenshots there. Pages that the command does not write (two timelines, malicious texts) are made
// from the template.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, describe, test } from 'node:test';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { chromium } from 'playwright-core';

const TEMPLATE = fileURLToPath(new URL('../../penstock/schedule/draw/page.html', import.meta.url));
const SCHEDULES = {
  zbv: ['ZBVZeroBubble', '--ranks', '4', '--microbatches', '8'],
  // The costs give sizes of activations, which the page shows: 64 KiB for each of eight stages.
  dual: ['DualPipeV', '--ranks', '4', '--microbatches', '10', '--costs', 'COSTS'],
  lowered: ['ZBVZeroBubble', '--ranks', '4', '--microbatches', '8', '--lowered', '--latency', '0.1'],
  // Two of four stages are recomputed; the first two ranks have less memory than they need.
  memory: ['GPipe', '--ranks', '4', '--microbatches', '8', '--recompute', '2,3', '--costs', 'SIZES'],
  large: ['1F1B', '--ranks', '256', '--microbatches', '512'],
};
// Losses of steps 11 to 60, one of which is not finite.
const CURVE = { name: 'Loss', first: 11, values: Array.from({ length: 50 }, (_, at) => (at === 20 ? null : 4.2 * 0.96 ** at)) };
const WIDE = { width: 1280, height: 800 }, NARROW = { width: 480, height: 800 };
const folder = mkdtempSync(join(tmpdir(), 'penstock-page-'));
const shots = process.env.PENSTOCK_SHOTS;
let browser;

before(async () => {
  assert.ok(process.env.PENSTOCK, 'PENSTOCK is not set. Hint: PENSTOCK=build/penstock node --test');
  const costs = join(folder, 'costs.json');
  writeFileSync(costs, JSON.stringify({ version: 1, stages: Array(8).fill({ activation_bytes: 65536 }) }));
  const sizes = join(folder, 'sizes.json');
  const stage = { activation_bytes: 8 << 20, input_bytes: 1 << 20, parameter_bytes: 16 << 20 };
  writeFileSync(sizes, JSON.stringify({ version: 2, stages: Array(4).fill(stage), ranks: Array(4).fill({ capacity: 60 << 20 }) }));
  for (const [name, schedule] of Object.entries(SCHEDULES)) {
    const file = join(folder, `${name}.html`), words = schedule.map((word) => ({ COSTS: costs, SIZES: sizes }[word] ?? word));
    execFileSync(process.env.PENSTOCK, ['schedule', 'show', ...words, '--format', 'html', '-o', file]);
  }
  const html = readFileSync(TEMPLATE, 'utf8').replace('@PENSTOCK_TITLE@', 'by hand');
  const pages = { hand: byHand(), moved: withTransfers('memory'), curve: { ...byHand(), title: 'with a curve', curve: CURVE }, memories: twice('memory') };
  for (const [name, data] of Object.entries(pages)) {
    const json = JSON.stringify(data).replaceAll('<', '\\u003c');
    writeFileSync(join(folder, `${name}.html`), html.replace('@PENSTOCK_DATA@', () => json));
  }
  if (shots) mkdirSync(shots, { recursive: true });
  browser = await chromium.launch({
    executablePath: '/usr/bin/chromium',
    args: ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
      '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
});
after(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true, force: true });
});

// The data of a page, with a second timeline that has less memory, as `penstock train` draws what it has measured.
function twice(name) {
  const page = readFileSync(join(folder, `${name}.html`), 'utf8');
  const data = JSON.parse(/<script type="application\/json" id="data">(.*?)<\/script>/s.exec(page)[1]);
  const [measured] = structuredClone(data.timelines);
  for (const rank of measured.ranks) rank.memory.bytes = rank.memory.bytes.map((bytes) => bytes / 2);
  return { ...data, timelines: [{ ...measured, name: 'measured' }, { ...data.timelines[0], name: 'simulated' }] };
}

// The data of a page of two timelines, of which the first was measured on devices: rank 0 sends its two first outputs beside its
// next forward, and rank 1 receives them, and its first gradient later.
function withTransfers(name) {
  const data = twice(name), [measured] = data.timelines, kind = (word) => data.kinds.indexOf(word);
  const moved = (...all) => Object.fromEntries(['kind', 'stage', 'microbatch', 'other', 'peer', 'start', 'end', 'bytes'].map(
    (key, at) => [key, all.map((one) => one[at])]));
  measured.ranks[0].transfers = moved(
    [kind('SEND_F'), 0, 0, 1, 1, 1, 1.75, 4096], [kind('SEND_F'), 0, 1, 1, 1, 2, 2.75, 4096]);
  measured.ranks[1].transfers = moved(
    [kind('RECV_F'), 1, 0, 0, 0, 1, 1.9, 4096], [kind('RECV_F'), 1, 1, 0, 0, 2, 2.9, 4096]);
  return data;
}

// Two ranks in two timelines. Stage 0 has a skip connection to stage 2.
function byHand() {
  const kinds = ['F', 'I', 'W', 'B', 'UNSHARD', 'RESHARD', 'REDUCE_GRAD', 'SUM_SHARED', 'SEND_F', 'RECV_F', 'SEND_B',
    'RECV_B'];
  const rank = (actions) => ({
    peak_activations: 2, peak_bytes: 3.5 * 2 ** 30, work: 6, idle: { fill: 0, drain: 1, waiting: { 1: 2 } },
    kind: actions.map(([kind]) => kinds.indexOf(kind)), stage: actions.map(([, stage]) => stage),
    microbatch: actions.map(([, , microbatch]) => microbatch), start: actions.map(([, , , start]) => start),
    end: actions.map(([, , , , end]) => end), other: actions.map(([, , , , , other = -1]) => other),
  });
  const ranks = [
    rank([['UNSHARD', 0, -1, 0, 0], ['F', 0, 0, 0, 1], ['SEND_F', 0, 0, 1, 1, 1], ['SEND_F', 0, 0, 1, 1, 2],
      ['RECV_F', 2, 0, 2, 2, 1], ['F', 2, 0, 2, 3], ['B', 2, 0, 3, 5], ['SEND_B', 2, 0, 5, 5, 1], ['B', 0, 0, 7, 9],
      ['REDUCE_GRAD', 0, -1, 9, 9]]),
    rank([['RECV_F', 1, 0, 1, 1, 0], ['F', 1, 0, 1, 2], ['SEND_F', 1, 0, 2, 2, 2], ['RECV_B', 1, 0, 5, 5, 2],
      ['B', 1, 0, 5, 7], ['SEND_B', 1, 0, 7, 7, 0]]),
  ];
  const timeline = { makespan: 40, bubble: 0.8, ranks };
  return {
    version: 1, title: '</script><b>by hand</b>', subtitle: '2 ranks', stages: 3, microbatches: 1, placement: [0, 1, 0],
    edges: [[0, 2]], shared: [[0, 2]], kinds, unit: 'ms',
    timelines: [{ name: 'simulated', ...timeline }, { name: 'measured', ...timeline, makespan: 30 }],
  };
}

async function open(t, name, { viewport = WIDE, colorScheme = 'light', reducedMotion = 'reduce', prepare } = {}) {
  const context = await browser.newContext({ viewport, colorScheme, reducedMotion });
  t.after(() => context.close());
  const page = await context.newPage();
  page.trouble = [];
  page.asked = [];
  page.on('console', (message) => page.trouble.push(message.text()));
  page.on('pageerror', (error) => page.trouble.push(error.stack));
  page.on('request', (request) => page.asked.push(request.url()));
  if (prepare) await page.addInitScript(prepare);
  page.url = pathToFileURL(join(folder, `${name}.html`)).href;
  await page.goto(page.url);
  await settled(page);
  return page;
}
const settled = (page) => page.evaluate(() => penstock.settled());
const view = (page) => page.evaluate(() => penstock.view);
const fit = (page) => page.evaluate(() => penstock.fit);
const focused = (page) => page.evaluate(() => penstock.focused?.text ?? null);
const rankOf = (page, rank) => page.evaluate((at) => penstock.data.timelines[0].ranks[at], rank);
const boxOf = (page, rank, index, timeline = 0) =>
  page.evaluate((place) => penstock.boxOf(...place), [timeline, rank, index]);
async function press(page, ...keys) {
  for (const key of keys) await page.keyboard.press(key);
  await settled(page);
}
async function hover(page, rank, index) {
  const box = await boxOf(page, rank, index);
  await page.mouse.move(box.x + box.width / 2, box.y + box.height / 2);
  await settled(page);
  return box;
}
// Returns the tooltip card as an object: its title, its text, and the value of each of its fields.
const card = (page) => page.evaluate(() => {
  const box = document.getElementById('card');
  if (box.hidden) return null;
  const texts = (selector) => [...box.querySelectorAll(selector)].map((element) => element.textContent);
  const values = texts('dd');
  return {
    title: box.querySelector('h3').textContent, words: box.querySelector('p').textContent,
    ...Object.fromEntries(texts('dt').map((name, at) => [name, values[at]])),
  };
});
const rgb = (text) => text.match(/[\d.]+/g).slice(0, 3).map(Number);
function contrast(a, b) {
  const [low, high] = [a, b].map((colour) => {
    const linear = (v) => (v <= 10.31 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = rgb(colour).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }).sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
}
// Returns the colour (red, green, blue, alpha) of a canvas (0: the timeline, 1: the overlay) at a point of the window.
const pixel = (page, layer, x, y) => page.evaluate(([at, px, py]) => {
  const canvas = document.querySelectorAll('#chart canvas')[at], area = canvas.getBoundingClientRect();
  return [...canvas.getContext('2d').getImageData(px - area.left, py - area.top, 1, 1).data];
}, [layer, x, y]);
// The card rounds to four digits.
function near(actual, expected, what) {
  const apart = Math.abs(actual - expected);
  assert.ok(apart <= 1e-3 * Math.max(1, Math.abs(expected)), `${what}: ${actual}, not ${expected}`);
}

describe('Every page', () => {
  for (const name of [...Object.keys(SCHEDULES), 'hand', 'curve']) {
    for (const [size, viewport] of Object.entries({ wide: WIDE, narrow: NARROW })) {
      for (const colorScheme of ['light', 'dark']) {
        test(`${name}, ${size}, ${colorScheme}: loads silently, asks for nothing, and fits the window`, async (t) => {
          const page = await open(t, name, { viewport, colorScheme });
          if (shots) await page.screenshot({ path: join(shots, `${name}-${size}-${colorScheme}.png`) });
          assert.deepEqual(page.trouble, []);
          assert.deepEqual(page.asked, [page.url]);
          const [needed, given] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
          assert.ok(needed <= given, `the page is ${needed} wide in a window of ${given}`);
          assert.ok((await page.evaluate(() => penstock.frame.blocks)) > 0, 'nothing was painted');
        });
      }
    }
  }

  test('shows the metrics of its data', async (t) => {
    for (const name of Object.keys(SCHEDULES)) {
      const page = await open(t, name);
      const { makespan, bubble, ranks } = await page.evaluate(() => penstock.data.timelines[0]);
      const pairs = await page.locator('#metrics dl').evaluateAll((metrics) => metrics.map((metric) =>
        [metric.querySelector('dt').textContent, metric.querySelector('b').textContent]));
      const shown = Object.fromEntries(pairs);
      const rounded = (value, digits) => value.toLocaleString('en', { maximumFractionDigits: digits });
      assert.equal(shown.Makespan.replaceAll(',', ''), String(Number(makespan.toPrecision(4))));
      assert.equal(shown.Bubble, `${rounded(bubble * 100, 1)}\u00a0%`);
      assert.equal(shown['Peak activations'], String(Math.max(...ranks.map((rank) => rank.peak_activations))));
      assert.equal(shown['Peak memory'], { dual: '576\u00a0KiB', memory: '80\u00a0MiB' }[name]);
    }
  });

  test('tells its metrics to a screen reader, and each rank’s in a table', async (t) => {
    const page = await open(t, 'zbv');
    const summary = await page.textContent('#summary');
    assert.match(summary, /ZBVZeroBubble.*Makespan.*Bubble.*Peak activations/);
    assert.equal(await page.locator('details tbody tr').count(), 4);
    const large = await open(t, 'large');
    assert.equal(await large.locator('details tbody tr').count(), 0);
    await large.click('summary');
    await large.waitForSelector('details tbody tr');
    assert.equal(await large.locator('details tbody tr').count(), 256);
  });
});

describe('The curve', () => {
  const boxes = (page, selector) => page.locator(selector).evaluateAll((found) => found.map((element) => {
    const { left, right, top, bottom } = element.getBoundingClientRect();
    return { text: element.textContent, left, right, top, bottom };
  }));

  test('takes no space where there is none', async (t) => {
    for (const name of ['zbv', 'hand']) {
      const page = await open(t, name);
      assert.equal(await page.locator('#curve').isVisible(), false);
      const [metrics] = await boxes(page, '#metrics'), [legend] = await boxes(page, '#legend');
      assert.ok(legend.top - metrics.bottom <= 24, `${legend.top - metrics.bottom} pixels between metrics and legend`);
    }
  });

  test('has labelled axes of values and steps', async (t) => {
    for (const viewport of [WIDE, NARROW]) {
      const page = await open(t, 'curve', { viewport });
      assert.deepEqual(page.trouble, []);
      assert.deepEqual((await boxes(page, '#curve text.name')).map(({ text }) => text), ['Loss', 'step']);
      const name = 'Loss: from 4.2 to 0.568 in steps 11 to 60, 1 of them not finite';
      assert.equal(await page.textContent('#curve-name'), name);
      // Marks are at their values: the largest and the smallest value lie between the outermost marks.
      const values = await boxes(page, '#curve text.value'), steps = await boxes(page, '#curve text.step');
      const middle = (box, one, other) => (box[one] + box[other]) / 2, [line] = await boxes(page, '#curve path');
      const along = (marks, one, other, value) => {
        const [a, b] = [marks[0], marks.at(-1)], [from, to] = [a, b].map((box) => middle(box, one, other));
        return from + (to - from) * (value - Number(a.text)) / (Number(b.text) - Number(a.text));
      };
      assert.ok(values.length >= 3 && steps.length >= 2, `${values.length} values, ${steps.length} steps`);
      assert.ok(Number(values[0].text) <= 0.568 && Number(values.at(-1).text) >= 4.2, values.map(({ text }) => text));
      for (const [found, expected] of [[line.top, along(values, 'top', 'bottom', 4.2)],
        [line.bottom, along(values, 'top', 'bottom', 4.2 * 0.96 ** 49)], [line.left, along(steps, 'left', 'right', 11)],
        [line.right, along(steps, 'left', 'right', 60)]]) assert.ok(Math.abs(found - expected) < 2, `${found}, not ${expected}`);
      assert.equal((await page.getAttribute('#curve path', 'd')).split('M').length, 3, 'a gap at the step without a value');
      // No label is cut off by the window or overlaps another.
      const all = await boxes(page, '#curve text');
      assert.ok(all.every(({ left, right }) => left >= 0 && right <= viewport.width), JSON.stringify(all));
      for (const [at, one] of all.entries()) {
        for (const other of all.slice(at + 1)) {
          const apart = one.right <= other.left || other.right <= one.left || one.bottom <= other.top || other.bottom <= one.top;
          assert.ok(apart, `${one.text} lies over ${other.text}`);
        }
      }
    }
  });
});

describe('The pointer', () => {
  test('finds every block where it is drawn', async (t) => {
    for (const name of ['zbv', 'dual']) {
      const page = await open(t, name);
      const [wrong, blocks] = await page.evaluate(() => {
        const missed = [];
        let count = 0;
        penstock.data.timelines[0].ranks.forEach(({ start, end }, rank) => start.forEach((_, index) => {
          if (end[index] <= start[index]) return;
          const box = penstock.boxOf(0, rank, index);
          const hit = penstock.blockAt(box.x + box.width / 2, box.y + box.height / 2);
          count += 1;
          if (hit?.rank !== rank || hit.index !== index) missed.push({ rank, index, box, hit });
        }));
        return [missed, count];
      });
      assert.deepEqual(wrong, []);
      assert.ok(blocks >= 4 * 2 * 8 * 2, `only ${blocks} blocks`);
    }
  });

  test('shows a card with the action, its place and its time', async (t) => {
    const page = await open(t, 'zbv');
    const words = {
      F: 'Forward of', I: 'Backward to the input of', W: 'Backward to the weights of', B: 'Whole backward of',
    };
    for (const rank of [0, 3]) {
      const row = await rankOf(page, rank);
      for (const index of [0, row.kind.length >> 1, row.kind.length - 1]) {
        const kind = (await page.evaluate(() => penstock.data.kinds))[row.kind[index]];
        if (!words[kind]) continue;
        await hover(page, rank, index);
        const told = await card(page);
        assert.equal(told.title, `${row.stage[index]}${kind}${row.microbatch[index]}`);
        assert.equal(told.words, `${words[kind]} stage ${row.stage[index]}, microbatch ${row.microbatch[index]}`);
        assert.match(told.Rank, new RegExp(`^${rank}, its stage [12] of 2$`));
        near(Number(told.Start), row.start[index], 'start');
        near(Number(told.End), row.end[index], 'end');
        near(Number(told.Duration), row.end[index] - row.start[index], 'duration');
      }
    }
  });

  test('shows in the card how long the rank was idle, and for which action it waited', async (t) => {
    const page = await open(t, 'zbv'), row = await rankOf(page, 1);
    const first = row.kind.findIndex((_, index) => row.end[index] > row.start[index]);
    await hover(page, 1, first);
    const told = await card(page);
    assert.equal(told.title, '1F0');
    near(Number(told['Idle before']), row.start[first], 'idle');
    assert.equal(told['Waited for'], '0F0 on rank 0');
    await hover(page, 0, (await rankOf(page, 0)).kind.findIndex((kind) => kind === 0));
    assert.equal((await card(page))['Idle before'], undefined);
  });

  test('shows cards of idle times and ranks too', async (t) => {
    const page = await open(t, 'zbv'), box = await boxOf(page, 3, 0), area = await page.locator('#chart').boundingBox();
    await page.mouse.move(box.x - 4, box.y + box.height / 2);
    await settled(page);
    const idle = await card(page);
    assert.equal(idle.title, 'idle');
    assert.equal(idle['Waited for'], '2F0 on rank 2');
    assert.equal(await page.evaluate(([x, y]) => penstock.blockAt(x, y), [box.x - 4, box.y + 4]), null);
    await page.mouse.move(area.x + 10, box.y + box.height / 2);
    await settled(page);
    assert.equal((await card(page)).title, 'rank 3');
    await page.mouse.move(area.x + 10, area.y - 40);
    await settled(page);
    assert.equal(await card(page), null);
  });

  test('highlights the microbatch on every rank, and dims the rest', async (t) => {
    const page = await open(t, 'zbv'), row = await rankOf(page, 0), chosen = row.microbatch[row.kind.indexOf(0)];
    await hover(page, 0, row.kind.indexOf(0));
    for (const rank of [1, 2, 3]) {
      const { microbatch, kind } = await rankOf(page, rank);
      const same = await boxOf(page, rank, microbatch.findIndex((of, index) => of === chosen && kind[index] < 4));
      const other = await boxOf(page, rank, microbatch.findIndex((of, index) => of === chosen + 2 && kind[index] < 4));
      const lit = await pixel(page, 1, same.x + same.width / 2, same.y + 4);
      assert.equal(lit[3], 255, `rank ${rank}: ${lit}`);
      assert.deepEqual(lit, await pixel(page, 0, same.x + same.width / 2, same.y + 4));
      // A link may cross a block, but not cover it.
      const points = [0.25, 0.5, 0.75].map((part) => pixel(page, 1, other.x + part * other.width, other.y + 4));
      const dimmed = Math.min(...(await Promise.all(points)).map(([, , , alpha]) => alpha));
      assert.ok(dimmed > 100 && dimmed < 220, `rank ${rank}: ${dimmed}`);
    }
  });

  test('distinguishes the two parts of an overlapped pair', async (t) => {
    const page = await open(t, 'dual'), ranks = await page.evaluate(() => penstock.data.timelines[0].ranks);
    const rank = ranks.findIndex(({ pair }) => pair?.some((id) => id > 0));
    assert.ok(rank >= 0, 'DualPipeV has no pairs');
    const { pair, stage, microbatch, kind } = ranks[rank], one = pair.findIndex((id) => id > 0);
    const other = pair.findIndex((id, index) => id === pair[one] && index !== one);
    const names = await page.evaluate(() => penstock.data.kinds);
    await hover(page, rank, one);
    assert.equal((await card(page))['Paired with'], `${stage[other]}${names[kind[other]]}${microbatch[other]}`);
  });
});

describe('The view', () => {
  test('zooms at the pointer, pans by drag and by shift and wheel, and grows its rows by alt and wheel', async (t) => {
    const page = await open(t, 'large'), area = await page.locator('#chart').boundingBox();
    const x = Math.round(area.x + area.width / 3), y = Math.round(area.y + area.height / 2), whole = await view(page);
    assert.deepEqual(whole, await fit(page));
    const before = await page.evaluate(([px, py]) => penstock.blockAt(px, py), [x, y]);
    await page.mouse.move(x, y);
    for (let turn = 0; turn < 8; ++turn) await page.mouse.wheel(0, -200);
    await settled(page);
    const closer = await view(page);
    assert.ok(closer.to - closer.from < (whole.to - whole.from) / 8, JSON.stringify(closer));
    assert.deepEqual(await page.evaluate(([px, py]) => penstock.blockAt(px, py), [x, y]), before);

    await page.mouse.down();
    await page.mouse.move(x - 100, y, { steps: 4 });
    await page.mouse.up();
    await settled(page);
    const dragged = await view(page);
    assert.ok(dragged.from > closer.from, `${dragged.from} after ${closer.from}`);
    near(dragged.to - dragged.from, closer.to - closer.from, 'span');

    await page.keyboard.down('Shift');
    await page.mouse.wheel(0, 200);
    await page.keyboard.up('Shift');
    await settled(page);
    assert.ok((await view(page)).from > dragged.from);

    await page.keyboard.down('Alt');
    for (let turn = 0; turn < 6; ++turn) await page.mouse.wheel(0, -240);
    await page.keyboard.up('Alt');
    await settled(page);
    const taller = await view(page);
    assert.ok(taller.row > 4 * whole.row && taller.scroll > 0, JSON.stringify(taller));
  });

  test('zooms, pans and resets by keyboard', async (t) => {
    const page = await open(t, 'large'), whole = await view(page);
    await page.locator('#chart').focus();
    await press(page, '+', '+', '+', ']', ']', ']', ']');
    const closer = await view(page);
    assert.ok(closer.to - closer.from < (whole.to - whole.from) / 4, JSON.stringify(closer));
    assert.ok(closer.row > 2 * whole.row, JSON.stringify(closer));
    await press(page, 'Shift+ArrowRight', 'Shift+ArrowDown');
    const panned = await view(page);
    assert.ok(panned.from > closer.from && panned.scroll > closer.scroll, JSON.stringify(panned));
    await press(page, '-');
    assert.ok((await view(page)).to - (await view(page)).from > closer.to - closer.from);
    await press(page, '0');
    assert.deepEqual(await view(page), whole);
    await press(page, '+', ']', 'Home');
    assert.deepEqual(await view(page), whole);
  });

  test('never leaves the schedule', async (t) => {
    const page = await open(t, 'zbv'), { makespan } = await page.evaluate(() => penstock.data.timelines[0]);
    await page.locator('#chart').focus();
    await press(page, '+', ...Array(12).fill('Shift+ArrowRight'));
    near((await view(page)).to, makespan, 'end');
    await press(page, ...Array(12).fill('Shift+ArrowLeft'), ...Array(9).fill('-'));
    assert.deepEqual(await view(page), await fit(page));
    await press(page, ...Array(80).fill('+'));
    const { from, to } = await view(page);
    assert.ok(from >= 0 && to <= makespan && to > from, `${from} to ${to}`);
    assert.deepEqual(page.trouble, []);
  });

  test('animates zooming, but not with reduced motion', async (t) => {
    const pressed = () => {
      dispatchEvent(new KeyboardEvent('keydown', { key: '+' }));
      return penstock.view.to - penstock.view.from < penstock.fit.to;
    };
    const still = await open(t, 'zbv'), gliding = await open(t, 'zbv', { reducedMotion: 'no-preference' });
    assert.equal(await still.evaluate(pressed), true);
    assert.equal(await gliding.evaluate(pressed), false);
    await settled(gliding);
    assert.deepEqual(await view(gliding), await view(still));
  });
});

describe('The keyboard', () => {
  test('reaches the tools, the legend and the timeline, in this order and visibly', async (t) => {
    const page = await open(t, 'zbv'), stops = [];
    const groups = (buttons) => buttons.map(({ dataset }) => dataset.group);
    const legend = await page.locator('[data-group]').evaluateAll(groups);
    for (let stop = 0; stop < 16; ++stop) {
      await page.keyboard.press('Tab');
      const [name, outline] = await page.evaluate(() => {
        const at = document.activeElement;
        return [at.dataset.does ?? at.dataset.group ?? (at.id || at.localName), getComputedStyle(at).outlineStyle];
      });
      if (name === 'body') break;
      stops.push(name);
      assert.notEqual(outline, 'none', `${name} does not show its focus`);
    }
    assert.deepEqual(stops, ['closer', 'farther', 'fit', 'theme', 'keys', ...legend, 'chart', 'summary']);
  });

  test('moves from block to block, with the card and the live region', async (t) => {
    const page = await open(t, 'zbv'), names = await page.evaluate(() => penstock.data.kinds);
    const row = await rankOf(page, 0), text = (of, i) => `${of.stage[i]}${names[of.kind[i]]}${of.microbatch[i]}`;
    const blocks = row.kind.flatMap((_, index) => (row.end[index] > row.start[index] ? [index] : []));
    await page.locator('#legend button').last().focus();
    await press(page, 'Tab');
    assert.equal(await focused(page), text(row, blocks[0]));
    await press(page, 'ArrowRight', 'ArrowRight');
    assert.equal(await focused(page), text(row, blocks[2]));
    assert.equal((await card(page)).title, text(row, blocks[2]));
    const spoken = await page.textContent('#live');
    assert.ok(spoken.startsWith(`${text(row, blocks[2])}: Forward of stage`), spoken);
    assert.match(spoken, /Rank 0.*Start .*End .*Duration /);
    await press(page, 'ArrowLeft');
    assert.equal(await focused(page), text(row, blocks[1]));
    await press(page, 'ArrowDown');
    assert.equal(await page.evaluate(() => penstock.focused.rank), 1);
    assert.ok((await page.textContent('#live')).includes('Rank 1'));
    await press(page, 'ArrowUp');
    assert.equal(await page.evaluate(() => penstock.focused.rank), 0);
    await press(page, 'Escape');
    assert.equal(await focused(page), null);
    assert.equal(await card(page), null);
  });

  test('scrolls the view along', async (t) => {
    const page = await open(t, 'large');
    await page.locator('#chart').focus();
    await press(page, 'ArrowRight', ...Array(10).fill('+'), ...Array(12).fill(']'));
    const start = await view(page);
    await press(page, ...Array(30).fill('ArrowDown'), ...Array(12).fill('ArrowRight'));
    const end = await view(page), { rank, index } = await page.evaluate(() => penstock.focused);
    assert.equal(rank, 30);
    assert.ok(end.from > start.from && end.scroll > start.scroll, JSON.stringify(end));
    const box = await boxOf(page, rank, index), area = await page.locator('#chart').boundingBox();
    assert.ok(box.x + box.width > area.x && box.x < area.x + area.width, JSON.stringify(box));
    assert.ok(box.y >= area.y && box.y + box.height <= area.y + area.height, JSON.stringify(box));
  });

  test('shows the keys on ?, and hides them on Esc', async (t) => {
    const page = await open(t, 'zbv'), keys = page.locator('#keys');
    await press(page, '?');
    assert.ok(await keys.isVisible());
    if (shots) await page.screenshot({ path: join(shots, 'keys.png') });
    await press(page, 'Escape');
    assert.ok(!(await keys.isVisible()));
  });
});

describe('Transfers that were measured', () => {
  // Index of a rank's first transfer, after its actions.
  const first = (page, rank) => page.evaluate((at) => penstock.data.timelines[0].ranks[at].kind.length, rank);

  test('are drawn under the computations beside which they ran', async (t) => {
    const page = await open(t, 'moved'), at = await first(page, 1);
    if (shots) await page.screenshot({ path: join(shots, 'transfers.png') });
    const computed = await boxOf(page, 1, 0), received = await boxOf(page, 1, at), sent = await boxOf(page, 0, await first(page, 0));
    assert.ok(received.y >= computed.y + computed.height, JSON.stringify([computed, received]));
    // Sends are above receives, and a lane of the same height is free on each rank.
    const shift = (await boxOf(page, 1, 0)).y - (await boxOf(page, 0, 0)).y;
    assert.ok(received.y - shift >= sent.y + sent.height, JSON.stringify([sent, received]));
    const { palette } = await page.evaluate(() => ({ palette: penstock.palette }));
    const shade = palette.find(({ group, stage }) => group === 'copy' && stage === 0).fill;
    for (const box of [received, sent]) {
      const [red, green, blue] = await pixel(page, 0, box.x + box.width / 2, box.y + box.height / 2);
      assert.equal(`rgb(${red} ${green} ${blue})`, shade);
    }
    // Rows of the simulated timeline have no such lane, so their blocks are taller.
    assert.ok((await boxOf(page, 1, 0, 1)).height > computed.height);
    assert.match(await page.textContent('#legend'), /Transfers of activations, gradients: sent above, received below/);
  });

  test('have cards with their size, and the part that ran beside computations', async (t) => {
    const page = await open(t, 'moved'), at = await first(page, 1);
    await hover(page, 1, at + 1);
    const found = await card(page);
    assert.equal(found.title, '1RECV_F1');
    assert.equal(found.words, 'Transfer: receives the input of stage 1, microbatch 1, from stage 0 on rank 0');
    assert.equal(found.From, 'rank 0');
    assert.equal(found.Size, '4\u00a0KiB');
    assert.equal(found.Duration, '0.9');
    // Rank 1 computes microbatch 0 from 1 to 2, and microbatch 1 from then on.
    assert.equal(found['Beside computation'], '100\u00a0%');
    const box = await boxOf(page, 0, await first(page, 0)), area = await page.locator('#chart').boundingBox();
    await hover(page, 0, await first(page, 0));
    assert.equal((await card(page)).To, 'rank 1');
    await page.mouse.move(area.x + 10, box.y);
    await settled(page);
    assert.equal((await card(page)).Transfers, '2, 8\u00a0KiB in 1.5');
  });

  test('are reached by keyboard, below their rank', async (t) => {
    const page = await open(t, 'moved');
    await page.locator('#chart').focus();
    await press(page, 'Escape', 'ArrowRight');
    assert.equal(await focused(page), '0F0');
    await press(page, 'ArrowRight', 'ArrowDown');
    assert.equal(await focused(page), '0SEND_F0');
    await press(page, 'ArrowRight', 'ArrowRight');
    assert.equal(await focused(page), '0SEND_F1');
    await press(page, 'ArrowDown');
    assert.equal(await focused(page), '1F1');
    // 0SEND_F1 ends when 0F2 runs.
    await press(page, 'ArrowUp', 'ArrowUp');
    assert.equal(await focused(page), '0F2');
  });

  test('are in the legend of no other page', async (t) => {
    const page = await open(t, 'memories');
    assert.doesNotMatch(await page.textContent('#legend'), /Transfers/);
  });
});

describe('The memory of ranks', () => {
  test('is drawn under their actions, with their capacity', async (t) => {
    const page = await open(t, 'memory'), box = await boxOf(page, 0, 0), last = await boxOf(page, 0, 15);
    const lane = box.y + box.height + 26;
    // At the bottom of the lane there is memory all the time; near its top only while all activations are saved.
    const at = async (x, y) => (await pixel(page, 0, x, y)).join(' ');
    const full = await at(box.x + 8 * box.width + 20, lane - 20), bottom = await at(box.x + 4, lane - 3);
    assert.equal(full, bottom);
    assert.notEqual(await at(box.x + 4, lane - 20), bottom);
    assert.notEqual(await at(last.x + last.width - 4, lane - 20), bottom);
    assert.match(await page.textContent('#legend'), /Recomputation.*Memory, up to 80\u00a0MiB/);
    assert.match(await page.textContent('#metrics'), /lowest 31\u00a0MiB; more than ranks 0, 1 have/);
    await page.mouse.move(box.x + 4, lane - 4);
    assert.match(await page.textContent('#card'), /Peak memory.*80\u00a0MiB.*Capacity.*60\u00a0MiB/);
  });

  test('is drawn in a common window for two timelines of four ranks', async (t) => {
    const page = await open(t, 'memories', { viewport: { width: 1366, height: 768 } });
    if (shots) await page.screenshot({ path: join(shots, 'memories.png') });
    const heights = [];
    for (const timeline of [0, 1]) {
      // While all activations are saved, the lane below the actions is full in one timeline, and half full in the other.
      const box = await boxOf(page, 0, 8, timeline), { row } = await page.evaluate(() => penstock.view);
      const lane = Math.round(row / 3), colours = [];
      for (let up = 2; up < lane; ++up) {
        colours.push((await pixel(page, 0, box.x - 6, box.y + box.height + lane - up)).join(' '));
      }
      heights.push(colours.filter((colour) => colour === colours[0]).length);
    }
    assert.ok(heights[0] >= 2 && heights[1] >= 1.5 * heights[0], String(heights));
    assert.match(await page.textContent('table'), /Capacity.*60\u00a0MiB/s);
  });

  test('matches its data', async (t) => {
    const page = await open(t, 'memory'), { ranks } = await page.evaluate(() => penstock.data.timelines[0]);
    for (const { memory, peak_bytes: peak } of ranks) {
      assert.equal(Math.max(...memory.bytes), peak);
      assert.equal(memory.bytes.at(-1), 16 << 20);
    }
  });
});

describe('The colours', () => {
  test('are readable, light and dark, on the page and in the blocks', async (t) => {
    for (const colorScheme of ['light', 'dark']) {
      const page = await open(t, 'zbv', { colorScheme });
      await hover(page, 1, 3);
      const pairs = await page.evaluate(() => {
        const paper = getComputedStyle(document.body).backgroundColor;
        const on = { '#card p': '#card', '#card dd': '#card', '#card dt': '#card' };
        const texts = ['h1', '#subtitle', '#metrics dt', '#metrics dd', '#metrics b', '#legend button', '#legend small',
          '#legend > span', '#hint', 'thead th', 'td', '#tools button', ...Object.keys(on)];
        return texts.map((selector) => [selector, getComputedStyle(document.querySelector(selector)).color,
          on[selector] ? getComputedStyle(document.querySelector(on[selector])).backgroundColor : paper]);
      });
      for (const { group, stage, fill, label } of await page.evaluate(() => penstock.palette)) {
        const hex = [1, 3, 5].map((at) => parseInt(label.slice(at, at + 2), 16)).join(' ');
        pairs.push([`label of ${group} on stage ${stage}`, `rgb(${hex})`, fill]);
      }
      for (const [what, text, ground] of pairs) {
        const found = contrast(text, ground);
        assert.ok(found >= 4.5, `${colorScheme}, ${what}: ${text} on ${ground} is ${found}`);
      }
    }
  });

  test('differ for each computation and stage of a rank', async (t) => {
    const page = await open(t, 'zbv'), palette = await page.evaluate(() => penstock.palette);
    const fills = palette.filter(({ group }) => 'FIWBR'.includes(group)).map(({ fill }) => fill);
    assert.equal(fills.length, 10);
    for (const [at, one] of fills.entries()) {
      for (const other of fills.slice(0, at)) {
        const apart = Math.hypot(...rgb(one).map((value, channel) => value - rgb(other)[channel]));
        assert.ok(apart > 40, `${one} and ${other}`);
      }
    }
    const { kind, stage } = await rankOf(page, 0), box = [];
    for (const of of [0, 7]) box.push(await boxOf(page, 0, kind.findIndex((k, i) => k === 0 && stage[i] === of)));
    const [first, last] = await Promise.all(box.map(({ x, y, width }) => pixel(page, 0, x + width / 2, y + 4)));
    assert.notDeepEqual(first, last);
  });

  test('follow the system, and the toggle', async (t) => {
    const page = await open(t, 'zbv', { colorScheme: 'dark' }), box = await boxOf(page, 3, 0);
    const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const look = async () => [await ground(), (await pixel(page, 0, box.x - 12, box.y + 20)).join(' ')];
    const night = await look();
    await page.click('[data-does=theme]');
    await settled(page);
    const day = await look();
    assert.ok(contrast(night[0], day[0]) > 12, `${night[0]} and ${day[0]}`);
    assert.notEqual(day[1], night[1]);
    await press(page, 't');
    assert.deepEqual(await look(), night);
    await page.emulateMedia({ colorScheme: 'light' });
    await page.waitForFunction(() => document.documentElement.dataset.theme === 'light');
    await settled(page);
    assert.deepEqual(await look(), day);
  });

  test('stand in a legend that emphasises a computation when pressed', async (t) => {
    const page = await open(t, 'zbv'), { kind } = await rankOf(page, 0);
    assert.match(await page.textContent('#legend'), /Forward.*Backward, input.*Backward, weights.*Idle/);
    const [forward, weights] = [await boxOf(page, 0, kind.indexOf(0)), await boxOf(page, 0, kind.indexOf(2))];
    const look = () => Promise.all([forward, weights].map(({ x, y, width }) => pixel(page, 0, x + width / 2, y + 4)));
    const plain = await look();
    await page.click('[data-group=W]');
    await settled(page);
    assert.equal(await page.getAttribute('[data-group=W]', 'aria-pressed'), 'true');
    const pressed = await look();
    assert.notDeepEqual(pressed[0], plain[0]);
    assert.deepEqual(pressed[1], plain[1]);
    await page.click('[data-group=W]');
    await settled(page);
    assert.deepEqual(await look(), plain);
  });

  test('turn to light paper in print, without the tools', async (t) => {
    const page = await open(t, 'zbv', { colorScheme: 'dark' });
    await page.emulateMedia({ media: 'print', colorScheme: 'dark' });
    await page.evaluate(() => dispatchEvent(new Event('beforeprint')));
    assert.equal(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), 'rgb(255, 255, 255)');
    assert.ok(!(await page.locator('#tools').isVisible()));
    await page.evaluate(() => dispatchEvent(new Event('afterprint')));
    assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), 'dark');
  });
});

describe('256 ranks', () => {
  test('are all in view at once, on a wide and on a narrow window', async (t) => {
    for (const viewport of [WIDE, NARROW]) {
      const page = await open(t, 'large', { viewport }), area = await page.locator('#chart').boundingBox();
      assert.ok(area.y + area.height <= viewport.height, `the timeline ends at ${area.y + area.height}`);
      const centres = await page.evaluate(() => penstock.data.timelines[0].ranks.map((_, rank) => {
        const { x, y } = penstock.boxOf(0, rank, 0), middle = y + penstock.view.row / 2;
        return { y: middle, hit: penstock.rankAt(x, middle)?.rank };
      }));
      assert.equal(centres.length, 256);
      centres.forEach(({ y, hit }, rank) => {
        assert.equal(hit, rank);
        assert.ok(y > area.y && y < area.y + area.height, `rank ${rank} at ${y}`);
      });
    }
  });

  // Counts drawing calls, as times would depend on the machine.
  test('are painted in few strokes, whatever the number of actions', async (t) => {
    const page = await open(t, 'large', {
      prepare: () => {
        window.strokes = 0;
        for (const name of ['fill', 'fillRect', 'fillText', 'stroke', 'strokeRect', 'drawImage']) {
          const original = CanvasRenderingContext2D.prototype[name];
          CanvasRenderingContext2D.prototype[name] = function counted(...values) {
            window.strokes += 1;
            return original.apply(this, values);
          };
        }
      },
    });
    const { blocks, mode, ms } = await page.evaluate(() => penstock.frame);
    assert.ok(blocks >= 256 * 512 * 2, `${blocks} blocks`);
    assert.equal(mode, 'pixels');
    assert.ok((await page.evaluate(() => window.strokes)) < 2000);
    t.diagnostic(`${blocks} blocks painted in ${ms.toFixed(1)} ms`);
  });

  test('show blocks and labels again when zoomed in', async (t) => {
    const page = await open(t, 'large');
    await page.locator('#chart').focus();
    await press(page, ...Array(14).fill('+'), ...Array(12).fill(']'));
    const { mode, blocks } = await page.evaluate(() => penstock.frame);
    assert.equal(mode, 'blocks');
    assert.ok(blocks > 0 && blocks < 3000, `${blocks} blocks`);
    if (shots) await page.screenshot({ path: join(shots, 'large-zoomed.png') });
  });
});

describe('A lowered schedule in two timelines', () => {
  const closer = async (page) => {
    await page.locator('#chart').focus();
    for (let turn = 0; turn < 20 && !(await page.evaluate(() => penstock.marks)); ++turn) await press(page, '+');
  };

  test('shows both timelines under their names, with metrics for each', async (t) => {
    const page = await open(t, 'hand');
    assert.equal(await page.textContent('h1'), '</script><b>by hand</b>');
    assert.deepEqual(await page.locator('#metrics h2').allTextContents(), ['simulated', 'measured']);
    const [above, below] = [await boxOf(page, 1, 1, 0), await boxOf(page, 0, 1, 1)];
    assert.ok(below.y > above.y + above.height, `${below.y} under ${above.y}`);
    assert.equal((await boxOf(page, 0, 1, 0)).x, below.x);
    assert.match(await page.textContent('#notes'), /Skip connections: 0 → 2\. Stages 0, 2 share parameters\./);
    assert.ok((await page.textContent('#metrics')).includes('3.5\u00a0GiB'));
    assert.ok((await page.textContent('#metrics')).includes('40\u00a0ms'));
  });

  test('hides transfers until there is enough space, then shows their cards', async (t) => {
    const page = await open(t, 'hand', { viewport: NARROW });
    assert.equal(await page.evaluate(() => penstock.marks), false);
    await closer(page);
    assert.equal(await page.evaluate(() => penstock.marks), true);
    await press(page, 'Escape', ...Array(20).fill('Shift+ArrowLeft'));
    const row = await rankOf(page, 0), titles = { 0: '0UNSHARD', 2: '0SEND_F0', 3: '0SEND_F0@2', 4: '2RECV_F0' };
    for (const [index, title] of Object.entries(titles)) {
      await hover(page, 0, Number(index));
      assert.equal((await card(page)).title, title);
    }
    assert.equal((await card(page))['Waited for'], '1F0 on rank 1');
    assert.equal((await card(page)).Start, `${row.start[4]}\u00a0ms`);
    if (shots) await page.screenshot({ path: join(shots, 'hand-marks.png') });
  });

  test('lets the keyboard step on transfers only while they are drawn', async (t) => {
    const page = await open(t, 'hand', { viewport: NARROW });
    await page.locator('#chart').focus();
    await press(page, 'Escape', 'ArrowRight');
    assert.equal(await focused(page), '0F0');
    await press(page, 'ArrowRight');
    assert.equal(await focused(page), '2F0');
    await press(page, 'ArrowLeft');
    await closer(page);
    await press(page, 'ArrowRight');
    assert.equal(await focused(page), '0SEND_F0');
  });
});
