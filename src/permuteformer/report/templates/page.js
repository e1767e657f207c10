"use strict";

// A click on a header sorts its table: up, down, and then as it was. Cells without a number stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  table.tHead.addEventListener("click", (event) => {
    const header = event.target.closest("button")?.closest("th");
    if (!header) return;
    const next = { none: "ascending", ascending: "descending", descending: "none" }[header.getAttribute("aria-sort")];
    for (const other of table.tHead.querySelectorAll("th")) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", next);
    const rows = next === "none" ? original : sorted(original, header.cellIndex, next === "descending" ? -1 : 1);
    body.append(...rows);
  });
}

function sorted(rows, column, sign) {
  const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const numeric = rows.some((row) => row.cells[column].dataset.value);
  return [...rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    if (a === "" || b === "") return (a === "") - (b === "");
    return sign * (numeric ? Number(a) - Number(b) : a.localeCompare(b));
  });
}

// Light and dark follow the system until the button is used; the choice is kept where the browser allows it.
const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
try { const kept = localStorage.getItem("theme"); if (kept === "light" || kept === "dark") root.dataset.theme = kept; } catch { /* not allowed */ }
button.hidden = false;
button.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not allowed */ }
  label();
});
dark.addEventListener("change", label);
label();

// A link to the runs of a cell opens them, if there is but one.
function show() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const runs = target ? target.querySelectorAll(":scope > details") : [];
  if (runs.length === 1) runs[0].open = true;
}
window.addEventListener("hashchange", show);
show();
