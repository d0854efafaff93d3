{{- define "inducekv.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "inducekv.selector" -}}
app.kubernetes.io/name: inducekv
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "inducekv.labels" -}}
{{ include "inducekv.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
