/** Preact and its parts under one name each: pages import from here, so that the libraries are named once. */
import htm from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

export { Component, Fragment, render } from "../vendor/preact.js";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal } from "../vendor/signals.js";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);
