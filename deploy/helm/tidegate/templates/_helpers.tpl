{{- define "tidegate.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "tidegate.labels" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: tidegate
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "tidegate.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Without rights, and without a root file system to write to. */}}
{{- define "tidegate.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "tidegate.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* A pod that runs one command against the database. */}}
{{- define "tidegate.databasePod" -}}
serviceAccountName: {{ include "tidegate.name" .root }}
automountServiceAccountToken: false
# Otherwise Kubernetes sets variables that begin with TIDEGATE_.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- include "tidegate.podSecurity" .root | nindent 2 }}
containers:
  - name: {{ .name }}
    image: {{ include "tidegate.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args: {{- toYaml .args | nindent 6 }}
    env:
      - name: TIDEGATE_LEDGER_FILE
        value: /secrets/ledger/url
    securityContext: {{- include "tidegate.containerSecurity" .root | nindent 6 }}
    resources:
      requests: {cpu: 10m, memory: 64Mi}
      limits: {memory: 256Mi}
    volumeMounts:
      - {name: ledger, mountPath: /secrets/ledger, readOnly: true}
volumes:
  - name: ledger
    secret:
      secretName: {{ .root.Values.ledgerSecret }}
{{- end }}
