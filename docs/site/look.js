// Runs in a browser, in the page that look.py serves: opens every page of the site in a frame, and tells look.py what is
// wrong there. A frame of 400 pixels is to its page what a phone is.
const WIDTHS = [400, 1280], SCHEMES = ["default", "slate"];
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const known = new Map();

// A colour of any notation as red, green, blue from 0 to 255 and alpha from 0 to 1.
function parsed(colour) {
  if (!known.has(colour)) {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    known.set(colour, [r, g, b, a / 255]);
  }
  return known.get(colour);
}

const over = (top, below) => [0, 1, 2].map(at => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);

function luminance(colour) {
  const [r, g, b] = colour.map(part => part / 255).map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

function ancestors(element) {
  const found = [];
  for (let here = element; here; here = here.parentElement) found.unshift(here);
  return found;
}

// What is behind the words of an element, and the words themselves on it.
function colours(element, view) {
  let background = [255, 255, 255, 1], words = null;
  for (const each of ancestors(element)) {
    const style = view.getComputedStyle(each), opacity = Number(style.opacity), below = background;
    background = over(parsed(style.backgroundColor), below);
    if (opacity < 1) background = over([...background.slice(0, 3), opacity], below);
  }
  const style = view.getComputedStyle(element);
  words = [...parsed(element.closest("svg") ? style.fill : style.color)];
  for (const each of ancestors(element)) words[3] *= Number(view.getComputedStyle(each).opacity);
  return [over(words, background), background];
}

function nameOf(element) {
  return ancestors(element).slice(-3).map(each => each.tagName.toLowerCase() + [...each.classList].map(name => "." + name).join("")).join(" > ");
}

// The elements that have words of their own, and a reader sees.
function worded(page) {
  const found = new Set(), walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, style, noscript, svg, .md-visually-hidden")) continue;
    if (element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length) found.add(element);
  }
  return [...found];
}

function weak(page, view) {
  const faults = new Map();
  for (const element of worded(page)) {
    const [words, background] = colours(element, view), style = view.getComputedStyle(element);
    // The theme hides some words by this until they are wanted, such as the sign of a heading's own link.
    if (ancestors(element).some(each => view.getComputedStyle(each).opacity === "0") || style.fontSize === "0px") continue;
    const size = parseFloat(style.fontSize), large = size >= 24 || size >= 18.66 && Number(style.fontWeight) >= 700;
    const ratio = contrast(words, background);
    if (ratio < (large ? 3 : 4.5)) faults.set(nameOf(element), `${ratio.toFixed(2)} to 1: "${element.textContent.trim().slice(0, 30)}"`);
  }
  return [...faults].map(([name, what]) => `${name} has ${what}`);
}

function scrolls(element, view) {
  return ["auto", "scroll"].includes(view.getComputedStyle(element).overflowX);
}

function wide(page, view) {
  const width = view.innerWidth, faults = new Map();
  if (page.documentElement.scrollWidth > width) faults.set("the page", `is ${page.documentElement.scrollWidth} pixels wide`);
  for (const element of worded(page)) {
    if (element.closest(".md-sidebar, .md-search, .md-header, .md-tabs, .md-footer")) continue;
    const all = ancestors(element);
    const range = page.createRange();
    range.selectNodeContents(element);
    const words = range.getBoundingClientRect();
    if (all.some(each => scrolls(each, view))) continue;
    if (words.right > width + 1 || words.left < -1) faults.set(nameOf(element), `goes from ${words.left.toFixed()} to ${words.right.toFixed()}`);
    const cut = all.find(each => view.getComputedStyle(each).overflowX !== "visible" && each !== page.body && each !== page.documentElement
      && words.right > each.getBoundingClientRect().right + 1);
    if (cut) faults.set(nameOf(element), `is cut: "${element.textContent.trim().slice(0, 40)}"`);
  }
  return [...faults].map(([name, what]) => `${name} ${what}`);
}

async function look(name, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 800px; border: 0`;
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; frame.src = name; });
  const page = frame.contentDocument, view = frame.contentWindow, faults = [];
  const still = page.createElement("style");
  still.textContent = "* { transition: none !important; animation: none !important }";
  page.head.append(still);
  for (const details of page.querySelectorAll("details")) details.open = true;
  await new Promise(done => setTimeout(done, 20));
  for (const scheme of SCHEMES) {
    page.body.setAttribute("data-md-color-scheme", scheme);
    faults.push(...weak(page, view).map(fault => `${name} at ${width}, ${scheme}: ${fault}`));
  }
  faults.push(...wide(page, view).map(fault => `${name} at ${width}: ${fault}`));
  frame.remove();
  return faults;
}

async function lookAtAll() {
  const faults = [];
  for (const name of PAGES)
    for (const width of WIDTHS) faults.push(...await look("/" + name, width));
  return faults;
}

lookAtAll().catch(error => [`look.js: ${error.stack}`]).then(answer);
