// What of Apache ECharts the report uses. echarts.toml says how echarts.min.js is built from this file.
import { init, use } from "echarts/core";
import { LineChart, TreemapChart } from "echarts/charts";
import {
  DataZoomInsideComponent, DataZoomSliderComponent, GridComponent, MarkLineComponent, TooltipComponent,
} from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

use([
  LineChart, TreemapChart,
  DataZoomInsideComponent, DataZoomSliderComponent, GridComponent, MarkLineComponent, TooltipComponent,
  SVGRenderer,
]);
export { init };
