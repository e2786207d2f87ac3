"use strict";
// Elements and figures of the page. Text becomes text nodes: no part of the page makes HTML of a string.
const Nodes = (() => {
  const SVG = "http:/" + "/www.w3.org/2000/svg";  // a name, which no browser fetches

  function filled(made, attributes, inside) {
    for (const [name, value] of Object.entries(attributes || {})) if (value !== "") made.setAttribute(name, value);
    made.append(...inside.map((one) => (one instanceof Node ? one : String(one))));
    return made;
  }

  const node = (tag, attributes, ...inside) => filled(document.createElement(tag), attributes, inside);
  const svg = (tag, attributes, ...inside) => filled(document.createElementNS(SVG, tag), attributes, inside);
  const count = (number) => Math.round(number).toLocaleString("en");
  const seconds = (s) => (s === null || s === undefined ? "-" : s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1000).toFixed(1)} ms`);
  const duration = (s) => (s < 60 ? `${s.toFixed(1)} s` : s < 3600 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
  const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "-");

  function bytes(number) {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (number < 1000) return `${number.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
      number /= 1000;
    }
    return `${number.toFixed(1)} TB`;
  }

  return { node, svg, count, seconds, duration, share, bytes };
})();
